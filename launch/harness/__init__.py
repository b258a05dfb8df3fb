"""A diffumesh model with the interface of lm-evaluation-harness."""
