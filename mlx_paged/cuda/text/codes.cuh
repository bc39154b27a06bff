// CUDA: what the kernels for quantised pages need besides the prelude.

namespace metal {
__device__ inline float round(float x) { return ::roundf(x); }
}  // namespace metal

__device__ inline float float_of(uint bits) { return __uint_as_float(bits); }

template <class T>
__device__ inline ushort& bits_of(T& x) { return reinterpret_cast<ushort&>(x); }
template <class T>
__device__ inline const ushort& bits_of(const T& x) { return reinterpret_cast<const ushort&>(x); }

// Return the value of a code, rounded once, as MLX's dequantising kernel computes it.
__device__ inline float dequantized(float scale, uint code, float bias) {
  return ::fmaf(scale, static_cast<float>(code), bias);
}
__device__ inline __half dequantized(__half scale, uint code, __half bias) {
  const __half value = static_cast<__half>(static_cast<float>(code));
  __half result;
  asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(bits_of(result)) : "h"(bits_of(scale)), "h"(bits_of(value)), "h"(bits_of(bias)));
  return result;
}
__device__ inline __nv_bfloat16 dequantized(__nv_bfloat16 scale, uint code, __nv_bfloat16 bias) {
#if __CUDA_ARCH__ >= 800
  const __nv_bfloat16 value = static_cast<__nv_bfloat16>(static_cast<float>(code));
  __nv_bfloat16 result;
  asm("fma.rn.bf16 %0, %1, %2, %3;" : "=h"(bits_of(result)) : "h"(bits_of(scale)), "h"(bits_of(value)), "h"(bits_of(bias)));
  return result;
#else
  return static_cast<__nv_bfloat16>(dequantized(static_cast<float>(scale), code, static_cast<float>(bias)));
#endif
}

template <class T, int N>
__device__ inline void set_packet(Packet<T, N>& packet, int i, T value) {
  packet.part[i] = value;
}

// Load one word, or two that are aligned to 8 bytes.
template <int N>
__device__ inline void load_words(const uint* source, uint* words) {
  if (N == 1) {
    words[0] = source[0];
  } else {
    const uint2 pair = *reinterpret_cast<const uint2*>(source);
    words[0] = pair.x;
    words[N - 1] = pair.y;
  }
}
