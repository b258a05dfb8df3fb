"""Results of ``diffumesh plan``: the ranking of one machine, tables and plots."""
