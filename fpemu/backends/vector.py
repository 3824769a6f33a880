"""A small vector vocabulary for kernels: sixteen lanes, written as formulas.

numba has no vector type, and plain loops over uint32 lose half the lanes (numba widens integers to
64 bits) and do not vectorise a 16-wide maximum. So the inner bodies of the kernels are Python
functions over `Vec`, which emit LLVM vector IR (``<16 x i32>``) inside a numba ``@intrinsic``.
LLVM makes the best of it for whatever CPU is there: one AVX-512 register, two AVX2, four SSE2.

No fast-math flag is ever set, so LLVM neither contracts a product and a sum into an FMA nor
reorders; bits do not depend on the CPU.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()


class Vec:
    """A value of ``LANES`` lanes with the operators of its element type.

    Python numbers on either side are splatted. Comparisons of integers are unsigned; `lt_signed`
    is the exception. ``==`` compares lanes, so a Vec is not hashable.
    """

    __slots__ = ("b", "v")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, b: ir.IRBuilder, v: ir.Value) -> None:
        self.b, self.v = b, v

    @property
    def element(self) -> ir.Type:
        return self.v.type.element

    def splat(self, value: Any, element: ir.Type | None = None) -> Vec:
        """`value` (a number, an IR scalar or a Vec) in every lane, as this vector's type."""
        if isinstance(value, Vec):
            return value
        element = element or self.element
        if not isinstance(value, ir.Value):
            if not isinstance(element, (ir.FloatType, ir.DoubleType)):
                value &= (1 << element.width) - 1
            kind = ir.VectorType(element, LANES)
            return Vec(self.b, ir.Constant(kind, [value] * LANES))
        return splat(self.b, value)

    def _binary(self, other: Any, integer: str, floating: str) -> Vec:
        op = integer if isinstance(self.element, ir.IntType) else floating
        return Vec(self.b, getattr(self.b, op)(self.v, self.splat(other).v))

    def __add__(self, other: Any) -> Vec:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Any) -> Vec:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Any) -> Vec:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Any) -> Vec:
        return self._binary(other, "sdiv", "fdiv")

    def __and__(self, other: Any) -> Vec:
        return self._binary(other, "and_", "")

    def __or__(self, other: Any) -> Vec:
        return self._binary(other, "or_", "")

    def __xor__(self, other: Any) -> Vec:
        return self._binary(other, "xor", "")

    def __lshift__(self, other: Any) -> Vec:
        return self._binary(other, "shl", "")

    def __rshift__(self, other: Any) -> Vec:
        return self._binary(other, "lshr", "")

    def __neg__(self) -> Vec:
        return self.splat(0) - self

    def _compare(self, op: str, other: Any) -> Vec:
        compare = (
            self.b.icmp_unsigned if isinstance(self.element, ir.IntType) else self.b.fcmp_ordered
        )
        return Vec(self.b, compare(op, self.v, self.splat(other).v))

    def __lt__(self, other: Any) -> Vec:
        return self._compare("<", other)

    def __gt__(self, other: Any) -> Vec:
        return self._compare(">", other)

    def __le__(self, other: Any) -> Vec:
        return self._compare("<=", other)

    def __eq__(self, other: Any) -> Vec:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: Any) -> Vec:  # type: ignore[override]
        return self._compare("!=", other)

    def lt_signed(self, other: Any) -> Vec:
        return Vec(self.b, self.b.icmp_signed("<", self.v, self.splat(other).v))

    def where(self, yes: Any, no: Any) -> Vec:
        """Lane by lane `yes` where this mask is true, else `no` (one of them a Vec)."""
        like = yes if isinstance(yes, Vec) else no
        return Vec(self.b, self.b.select(self.v, like.splat(yes).v, like.splat(no).v))

    def min(self, other: Any) -> Vec:
        other = self.splat(other)
        return (self < other).where(self, other)

    def max(self, other: Any) -> Vec:
        other = self.splat(other)
        return (self > other).where(self, other)

    def max_signed(self, other: Any) -> Vec:
        other = self.splat(other)
        return self.lt_signed(other).where(other, self)

    # Types -----------------------------------------------------------------------------------

    def _cast(self, op: str, element: ir.Type) -> Vec:
        return Vec(self.b, getattr(self.b, op)(self.v, ir.VectorType(element, LANES)))

    def bits(self) -> Vec:
        """The same bits as unsigned integers."""
        return self._cast("bitcast", I64 if isinstance(self.element, ir.DoubleType) else I32)

    def floats(self) -> Vec:
        """The same bits as float32 (float64 for 64-bit lanes)."""
        return self._cast("bitcast", F64 if self.element.width == 64 else F32)

    def to_f32(self) -> Vec:
        """float32 of a non-negative integer below 2**31 (exact below 2**24), or of a float64."""
        if isinstance(self.element, ir.DoubleType):
            return self._cast("fptrunc", F32)
        return self._cast("sitofp", F32)

    def to_int(self) -> Vec:
        """Integer part of a float32 in 0 .. 2**31 - 1."""
        return self._cast("fptosi", I32)

    def to_f64(self) -> Vec:
        return self._cast("fpext", F64)

    def widen(self, element: ir.Type = I32) -> Vec:
        return self._cast("zext", element)

    def narrow(self, element: ir.Type) -> Vec:
        return self._cast("trunc", element)

    def reduce_max(self) -> ir.Value:
        """Largest lane (unsigned) as a scalar."""
        name = f"llvm.vector.reduce.umax.v{LANES}i{self.element.width}"
        kind = ir.FunctionType(self.element, [self.v.type])
        return self.b.call(_declare(self.b, name, kind), [self.v])


def _declare(b: ir.IRBuilder, name: str, kind: ir.FunctionType) -> ir.Function:
    module = b.module
    return module.globals.get(name) or ir.Function(module, kind, name)


def splat(b: ir.IRBuilder, scalar: ir.Value) -> Vec:
    """An IR scalar in every lane."""
    kind = ir.VectorType(scalar.type, LANES)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return Vec(b, b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros))


def lanes_below(b: ir.IRBuilder, count: ir.Value) -> Vec:
    """Mask of the first `count` (an i32) lanes."""
    index = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    return Vec(b, index) < splat(b, count)


def load(b: ir.IRBuilder, pointer: ir.Value, element: ir.Type, mask: Vec | None = None) -> Vec:
    """Sixteen elements from any address; lanes outside `mask` are 0 and are not touched."""
    kind = ir.VectorType(element, LANES)
    pointer = b.bitcast(pointer, kind.as_pointer())
    if mask is None:
        return Vec(b, b.load(pointer, align=_size(element)))
    function = ir.FunctionType(kind, [kind.as_pointer(), I32, mask.v.type, kind])
    name = f"llvm.masked.load.v{LANES}{_mangle(element)}.p0"
    align, zero = ir.Constant(I32, _size(element)), ir.Constant(kind, None)
    return Vec(b, b.call(_declare(b, name, function), [pointer, align, mask.v, zero]))


def store(b: ir.IRBuilder, pointer: ir.Value, value: Vec, mask: Vec | None = None) -> None:
    kind = value.v.type
    pointer = b.bitcast(pointer, kind.as_pointer())
    size = _size(kind.element)
    if mask is None:
        b.store(value.v, pointer, align=size)
        return
    function = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), I32, mask.v.type])
    name = f"llvm.masked.store.v{LANES}{_mangle(kind.element)}.p0"
    b.call(_declare(b, name, function), [value.v, pointer, ir.Constant(I32, size), mask.v])


def prefetch(b: ir.IRBuilder, pointer: ir.Value) -> None:
    """Ask for a cache line that will be read soon; any address is allowed."""
    raw = b.bitcast(pointer, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [raw.type, I32, I32, I32])
    read, near, data = (ir.Constant(I32, k) for k in (0, 3, 1))
    b.call(_declare(b, "llvm.prefetch.p0", kind), [raw, read, near, data])


def _size(element: ir.Type) -> int:
    if isinstance(element, ir.IntType):
        return element.width // 8
    return 8 if isinstance(element, ir.DoubleType) else 4


def _mangle(element: ir.Type) -> str:
    if isinstance(element, ir.IntType):
        return f"i{element.width}"
    return "f64" if isinstance(element, ir.DoubleType) else "f32"
