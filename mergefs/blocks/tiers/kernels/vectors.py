"""Pieces of LLVM's intermediate code that loops for vectors are made of. Vectors are llvmlite's types and values."""

from __future__ import annotations

from llvmlite import ir


def constant(vector, number):
    """A vector with a number in each lane."""
    return ir.Constant(vector, [number] * vector.count)


def splat(builder, scalar, vector):
    """A vector with a value in each lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    lanes = constant(ir.VectorType(ir.IntType(32), vector.count), 0)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, lanes)


def load(builder, address, vector, align):
    """What lies at an address (an integer), which is a multiple of `align`."""
    loaded = builder.load(builder.inttoptr(address, vector.as_pointer()))
    loaded.align = align
    return loaded


def store(builder, vector, address, align):
    """Write a vector to an address (an integer), which is a multiple of `align`."""
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer())).align = align
