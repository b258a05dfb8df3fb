"""Model families: their configurations, weight declarations and forward passes."""
