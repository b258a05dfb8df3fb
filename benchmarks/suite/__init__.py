"""All measurements of one model on one machine; each has a value or the reason why it was not run."""
