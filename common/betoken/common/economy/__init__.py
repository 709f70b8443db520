"""The economy of drafts: whether a draft is made now, how long it is, and by whom. See docs/economy.md for the formula.

Pure functions and small estimators over numbers and times that callers measure. Knows no clock, link, model or text.
"""
