"""Copy-on-write sessions: a model is changed as files, as arrays or through fsspec, and committed as a new manifest.

What a session is and what lies in its folder is in spec/edit.md.
"""
