"""All measurements of one model on one machine: one row each, with a value or the reason why it was not run."""
