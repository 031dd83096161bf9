"""`headrace bench admission` and `headrace bench fairness`: what letting requests in costs, and whom it protects."""
