"""Model folders that commands name: opened, prepared for writing, and legacy pickles."""
