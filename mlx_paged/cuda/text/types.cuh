// CUDA only, for texts compiled without CUDA's headers: what they use of cuda_fp16.h, cuda_bf16.h and cstdint, made
// with the same instructions.
#ifdef __CUDACC_RTC__
using int64_t = long long;
using uint32_t = unsigned int;
#endif
struct alignas(2) __half {
  unsigned short bits;
  __half() = default;
  __device__ explicit __half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct alignas(2) __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __device__ explicit __nv_bfloat16(float x) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    const unsigned all = __float_as_uint(x);  // round to nearest, ties to even; NaN stays NaN
    bits = (all & 0x7fffffff) > 0x7f800000 ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
#endif
  }
  __device__ explicit operator float() const {
    float x;
#if __CUDA_ARCH__ >= 900
    asm("cvt.f32.bf16 %0, %1;" : "=f"(x) : "h"(bits));
#else
    asm("mov.b32 %0, {0, %1};" : "=f"(x) : "h"(bits));
#endif
    return x;
  }
};
