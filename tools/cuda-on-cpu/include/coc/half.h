// Functions of the 16-bit types that NVIDIA's headers define for the device only: computed in float, rounded once.
#pragma once

#define COC_UNARY(name, expression)            \
  inline __half name(__half h) {               \
    float x = __half2float(h);                 \
    return __float2half(expression);           \
  }                                            \
  inline __nv_bfloat16 name(__nv_bfloat16 h) { \
    float x = __bfloat162float(h);             \
    return __float2bfloat16(expression);       \
  }
COC_UNARY(hsqrt, sqrtf(x))
COC_UNARY(hrsqrt, rsqrtf(x))
COC_UNARY(hrcp, 1.0f / x)
COC_UNARY(hexp, expf(x))
COC_UNARY(hexp2, exp2f(x))
COC_UNARY(hexp10, exp10f(x))
COC_UNARY(hlog, logf(x))
COC_UNARY(hlog2, log2f(x))
COC_UNARY(hlog10, log10f(x))
COC_UNARY(hsin, sinf(x))
COC_UNARY(hcos, cosf(x))
COC_UNARY(htanh, tanhf(x))
COC_UNARY(hfloor, floorf(x))
COC_UNARY(hceil, ceilf(x))
COC_UNARY(htrunc, truncf(x))
COC_UNARY(hrint, nearbyintf(x))
#undef COC_UNARY
