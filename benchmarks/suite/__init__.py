"""The whole set of measurements of one model on one machine, a row each, filled or marked not run and why."""
