"""SwiGLU with the router weight folded in, and the power-of-two scale of its output."""

from megamoe.kernel.compat import gl, gluon

# gate / (1 + 2^(-gate log2 e)), in five instructions and the same in every kernel
SILU = gl.constexpr("""
{
.reg .f32 e;
mul.f32 e, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 e, e;
add.f32 e, e, 0f3F800000;
rcp.approx.ftz.f32 e, e;
mul.f32 $0, $1, e;
}
""")


@gluon.jit
def silu(gate):
    """gate * sigmoid(gate) in fp32; relative error below 1e-6."""
    return gl.inline_asm_elementwise(SILU, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def swiglu(gate, up, weight, CLAMP: gl.constexpr):
    """silu(gate) * up * weight in fp32; gate <= CLAMP and -CLAMP <= up <= CLAMP first, unless
    CLAMP is 0.
    """
    if CLAMP != 0.0:
        # written so that NaN stays NaN
        gate = gl.where(gate > CLAMP, CLAMP, gate)
        up = gl.where(up > CLAMP, CLAMP, gl.where(up < -CLAMP, -CLAMP, up))
    return silu(gate) * up * weight


@gluon.jit
def power_of_two_scale(amax):
    """The smallest normal s = 2^e with amax <= 448 s, and 1/s.

    448 is 1.75 * 2^8: adding 0x1FFFFF carries into the exponent exactly when the mantissa of amax
    exceeds 1.75.
    """
    bits = amax.to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1), 253)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    # an infinite group becomes NaN: saturating it to 448 would hide it
    inverse = gl.where(bits >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23).to(
        gl.float32, bitcast=True
    )
    return scale, inverse
