// CUDA dialect: defines the Metal names that the kernel bodies use.
namespace mlx::core::cu {
using uint = unsigned int;
using ushort = unsigned short;
namespace metal {
__device__ inline float exp2(float x) { return ::exp2f(x); }
__device__ inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ inline float rsqrt(float x) { return ::rsqrtf(x); }
__device__ inline float max(float a, float b) { return ::fmaxf(a, b); }
__device__ inline float min(float a, float b) { return ::fminf(a, b); }
__device__ inline int max(int a, int b) { return a < b ? b : a; }
__device__ inline int min(int a, int b) { return b < a ? b : a; }
namespace fast {
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float divide(float a, float b) { return __fdividef(a, b); }
}  // namespace fast
namespace precise {
__device__ inline float tanh(float x) { return ::tanhf(x); }
__device__ inline float cos(float x) { return ::cosf(x); }
__device__ inline float sin(float x) { return ::sinf(x); }
}  // namespace precise
}  // namespace metal

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
__device__ constexpr mem_flags operator|(mem_flags a, mem_flags) { return a; }
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }

template <class V>
__device__ inline V simd_shuffle(V x, ushort n) {
  return __shfl_sync(0xffffffffu, x, n);
}
template <class V>
__device__ inline V simd_shuffle_xor(V x, ushort n) {
  return __shfl_xor_sync(0xffffffffu, x, n);
}
template <class V>
__device__ inline V simd_sum(V x) {
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
__device__ inline float simd_max(float x) {
  for (int o = 16; o; o >>= 1) x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}
__device__ inline bool simd_any(bool x) { return __any_sync(0xffffffffu, x); }

// N elements of T loaded together; converted only when they are used.
template <class T, int N>
struct alignas(sizeof(T) * N) Packet {
  T part[N];
};
template <int BYTES>
struct RawPacket;
template <>
struct RawPacket<16> {
  using type = uint4;
};
template <>
struct RawPacket<8> {
  using type = uint2;
};
template <class T, int N>
__device__ inline Packet<T, N> load_packet(const T* source) {
  using Raw = typename RawPacket<sizeof(T) * N>::type;
  union {
    Raw raw;
    uint words[sizeof(Raw) / 4];
  } bits;
  bits.raw = *reinterpret_cast<const Raw*>(source);
  Packet<T, N> packet;
  memcpy(&packet, &bits, sizeof(Raw));
  return packet;
}
template <class T, int N>
__device__ inline Packet<T, N> zero_packet() {
  Packet<T, N> packet;
  memset(&packet, 0, sizeof(packet));
  return packet;
}
template <class T, int N>
__device__ inline void store_packet(T* target, Packet<T, N> packet) {
  using Raw = typename RawPacket<sizeof(T) * N>::type;
  Raw raw;
  memcpy(&raw, &packet, sizeof(Raw));
  *reinterpret_cast<Raw*>(target) = raw;
}
template <class T, int N>
__device__ inline float packet_value(const Packet<T, N>& packet, int i) {
  return static_cast<float>(packet.part[i]);
}
}  // namespace mlx::core::cu

#define threadgroup_position_in_grid (blockIdx)
#define threadgroups_per_grid (gridDim)
#define thread_position_in_threadgroup (threadIdx)
#define threads_per_threadgroup (blockDim)
#define thread_position_in_grid \
  (make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z))
#define thread_index_in_simdgroup (threadIdx.x % 32u)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32u)
#define UNROLL _Pragma("unroll")
// Return which of OWNERS lanes holds number n if lane bit 0 stands for the top bit of n, lane bit 1 for the next, and
// so on.
#define SCORE_OWNER(n, OWNERS) \
  ((((n) & 1) << 4 | ((n) & 2) << 2 | ((n) & 4) | ((n) & 8) >> 2 | ((n) & 16) >> 4) / (32 / (OWNERS)))
#define FUNCTION __device__ inline
// Must come last: __device__ expands to a text with the word device in it.
#define device
#define constant
#define thread
#define threadgroup __shared__
