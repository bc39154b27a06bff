// Emulator: what the decode kernels for tensor cores use of text/prelude.cuh and CUDA, beyond tensor_cpu.hpp.
extern "C" {
float exp2f(float);
float fmaxf(float, float);
float fminf(float, float);
float fmaf(float, float, float);
float fabsf(float);
float roundf(float);
float tanhf(float);
}
#define __device__
#define memcpy(target, source, size) __builtin_memcpy((void*)(target), (const void*)(source), size)
#define __shfl_xor_sync(mask, x, n) simd_shuffle_xor(x, n)
typedef half __half;
inline float4 make_float4(float x, float y, float z, float w) { return float4(x, y, z, w); }
inline float2 make_float2(float x, float y) { return float2(x, y); }
inline float power_of(float x) { return exp2f(x); }
inline uint __byte_perm(uint x, uint y, uint selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint picked = 0;
  for (int i = 0; i < 4; i++) picked |= uint(bytes >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
  return picked;
}
// Thread groups run one after the other here, so each sees the stores of those before it.
MSL_NOSAN inline bool arrive(uint* counter, uint n) {
  const bool last = *counter == n - 1;
  *counter = last ? 0 : *counter + 1;
  return last;
}
template <class V>
MSL_NOSAN inline V load_relaxed(const V* source) {
  V x;
  for (uint i = 0; i < sizeof(V) / 4; i++) reinterpret_cast<float*>(&x)[i] = reinterpret_cast<const volatile float*>(source)[i];
  return x;
}
inline uint transpose8x8(uint x, int line = __builtin_LINE()) {
  const auto lanes = metal::msl_gather(x, 33, line);
  const uint lane = msl_rt::cur_lane(), row = lane % 4 * 2, half = lane / 4 % 2 * 16;
  const uint low = lanes.v[row * 4 + lane / 8] >> half, high = lanes.v[row * 4 + 4 + lane / 8] >> half;
  return (low & 0xffff) | high << 16;
}
inline uint select_bits(uint word, uint mask, uint bits) { return (word & mask) | bits; }
template <int N, bool WHOLE>
inline void stream_words(const uint* source, uint* target) {
  static_assert(N == 1 || N == 2 || N == 4);
  if (reinterpret_cast<uint64_t>(source) % (N * 4)) msl_rt::fail("words at an odd address");
  for (int i = 0; i < N; i++) target[i] = source[i];
}
inline uint stream_half_word(const ushort* source) { return *source; }
template <int N>
inline void load_factors(const uint* source, uint (&target)[N]) {
  if (reinterpret_cast<uint64_t>(source) % (N % 4 == 0 ? 16 : N % 2 == 0 ? 8 : 4)) msl_rt::fail("factors at an odd address");
  for (int i = 0; i < N; i++) target[i] = source[i];
}
inline float largest_of(float x, int line = __builtin_LINE()) { return simd_max(x, line); }
template <class T>
inline void store_words(T* target, uint4 words) {
  for (int i = 0; i < 4; i++) __builtin_memcpy((void*)(target + i * 2), (const void*)&words[i], 4);
}
// Part flags of text/latent_decode.cuh.
template <int COUNT>
inline void fewer_registers() {}
template <int COUNT>
inline void more_registers() {}
struct Flag {
  uint64_t bits;
  void begin(int arrivals) { msl_rt::flag_begin(this, arrivals); }
  void arrive(int lane, int line = __builtin_LINE()) {
    msl_rt::barrier_simd(msl_rt::MEM_TG | msl_rt::MEM_DEVICE, line);
    if (lane == 0) msl_rt::flag_arrive(this);
  }
  void wait(int turn, int line = __builtin_LINE()) { msl_rt::flag_wait(this, unsigned(turn), line); }
};
// Flags of the emulator, known by a small number; a kernel's flags are known by their address.
inline void warpgroup_barrier(int group, int line = __builtin_LINE()) {
  const void* const at = reinterpret_cast<const void*>(uint64_t(group + 1));
  msl_rt::flag_group(at, 4, line);
}
template <class T>
inline void store_four(T* target, float a, float b, float c, float d) {
  const float all[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) target[i] = static_cast<T>(all[i]);
}
