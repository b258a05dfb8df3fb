"""Files of prompts: reading lines, building records, and the output folder that survives restarts."""
