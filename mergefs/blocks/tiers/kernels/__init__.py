"""Compiled loops of the tiered encoding. Every function releases the interpreter lock.

Importing these modules loads numba, so they are imported only where blocks are encoded or decoded. In all of them

- `expert`, `base`: uint16[n], the bits of bf16 elements;
- the *class* of an element is the exponent field of its base value, 0 to 255;
- `q`: int8[n], signed quantised magnitudes;
- `codes`: uint64, eight bytes of which byte m is the centroid code of |q| = m;
- `unit`: float32, the power of two that codes count.

A cached loop is compiled again when its own file changes, not when a function that it uses does: after editing
`floats`, `centroids`, `streams` or `quantise`, remove the cache (`__pycache__`).
"""
