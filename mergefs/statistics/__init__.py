"""What is known of an expert: statistics of its delta from a base, block by block.

One value in the catalog holds the statistics of one tensor (layout in spec/catalog.md). All figures are of the
exact delta in the value domain, the float32 difference of the two elements.
"""
