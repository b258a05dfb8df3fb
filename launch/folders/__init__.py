"""The folders that commands read and write: model folders, output folders, and legacy pickles."""
