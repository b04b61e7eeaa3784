"""Many processes that use one repository at once, and a judge of what they saw.

`worker` runs random commands and writes down what it did and saw, and when; `history` is what that is written in, and
judges it; `__main__` starts the workers, and looks at what is left.
"""
