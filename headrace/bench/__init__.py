"""Reproducible comparisons of headrace with something a reader knows the price of.

A **bench** is a module with its `FIGURES` and a coroutine `measure` (see `headrace.bench.catalogue`); everything else
is the same for all of them and lives here: choosing figures, medians with their spread, the table, the JSON, the plot.

Figures are meant to survive a machine that is shared and a CPU that changes its clock. So the sides of a comparison
take turns within each round instead of running one after the other, a ratio is formed within its round, and the median
of several rounds is reported with the smallest and largest. Costs are CPU time of a whole process tree around a fixed
number of messages, not throughput: what others do on the machine hardly changes it.
"""
