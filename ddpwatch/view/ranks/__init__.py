"""The table of ranks and the page of one rank.

Here: columns, order, facts and detail of ranks. Not here: the table widget (`tui.rank_table`). Begin with `columns`.
"""
