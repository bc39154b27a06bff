// CUDA dialect: the Metal names that all kernels use; then, for kernels on tensor cores, NVIDIA's instructions, and for
// portable kernels over quantised pages, what these need.
namespace mlx::core::cu {
using uint = unsigned int;
using ushort = unsigned short;
namespace metal {
__device__ inline float exp2(float x) { return ::exp2f(x); }
__device__ inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ inline float round(float x) { return ::roundf(x); }
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
  const Raw raw = *reinterpret_cast<const Raw*>(source);
  Packet<T, N> packet;
  memcpy(&packet, &raw, sizeof(Raw));
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
__device__ inline float float_of(uint bits) { return __uint_as_float(bits); }
#if TENSOR

// Kernels on tensor cores ------------------------------------------------------------------------------------------

// Load 16 bytes that are read once, without keeping them in L1. Not by ld.global.nc: the kernel may have stored them.
__device__ inline uint4 stream_load(const void* source) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(source));
  return x;
}
__device__ inline uint4 load_aligned(const void* source) {
  return *reinterpret_cast<const uint4*>(source);
}
__device__ inline bool is_aligned(const void* address) {
  return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}
// Names a case that a generic lambda is compiled for.
template <bool VALUE>
struct Case {
  static constexpr bool value = VALUE;
};
template <class T>
__device__ inline unsigned pack(T low, T high) {
  unsigned short bits[2];
  memcpy(&bits[0], &low, 2);
  memcpy(&bits[1], &high, 2);
  return static_cast<unsigned>(bits[0]) | static_cast<unsigned>(bits[1]) << 16;
}
// Load eight values from an address that need not be a multiple of 16 bytes.
template <class T>
__device__ inline uint4 load_words(const T* source) {
  return make_uint4(pack(source[0], source[1]), pack(source[2], source[3]), pack(source[4], source[5]), pack(source[6], source[7]));
}
__device__ inline uint4 load_words(const unsigned* source) {
  return make_uint4(source[0], source[1], source[2], source[3]);
}
// Count this thread group as arrived, one of n, after its stores. Return true for the last: it sees the stores of all,
// and the counter is 0 again.
__device__ inline bool arrive(unsigned* counter, unsigned n) {
  unsigned before;
  asm volatile("atom.inc.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(n - 1) : "memory");
  if (before != n - 1) return false;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  return true;
}
// Load what other thread groups have stored.
__device__ inline float4 load_relaxed(const float4* source) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(source) : "memory");
  return x;
}
__device__ inline float2 load_relaxed(const float2* source) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(source) : "memory");
  return x;
}
// Return 2^x, also of an infinite x or NaN; denormals are flushed to 0.
__device__ inline float power_of(float x) { return metal::fast::exp2(x); }
// 8 x 8 matrix of 16-bit values, one row per four lanes: return its transpose.
__device__ inline unsigned transpose8x8(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ inline unsigned word(uint4 x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
template <class T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<__half> = true;
template <class T>
__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (is_half<T>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}
// Round two values to T and pack them, the first in the low half.
template <class T>
__device__ inline unsigned pack_rounded(float low, float high) {
  unsigned x;
  if constexpr (is_half<T>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  }
  return x;
}
// Return a * b + c of two packed values each, rounded once.
template <class T>
__device__ inline unsigned fma2(unsigned a, unsigned b, unsigned c) {
  unsigned x;
  if constexpr (is_half<T>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  }
  return x;
}
// Return byte i of a word: with 2^23 above it, it is the end of a float's mantissa.
__device__ inline float byte_of(unsigned x, int i) {
  return __uint_as_float(__byte_perm(x, 0x4b000000u, 0x7440 + i)) - 8388608.0f;
}
// Return the low (high) halves of two words, the first word's in the low half.
__device__ inline unsigned low_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
__device__ inline unsigned high_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x7632); }
// Return the first (low_of) or second (high_of) of two packed values.
template <class T>
__device__ inline float low_of(unsigned x) {
  if constexpr (!is_half<T>) return __uint_as_float(x << 16);
  float low;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(low) : "r"(x));
  return low;
}
template <class T>
__device__ inline float high_of(unsigned x) {
  if constexpr (!is_half<T>) return __uint_as_float(x & 0xffff0000u);
  float high;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(high) : "r"(x));
  return high;
}
// Store four adjacent values; the address is a multiple of their size.
template <class T>
__device__ inline void store_four(T* target, float a, float b, float c, float d) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(target) = make_float4(a, b, c, d);
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(pack_rounded<T>(a, b), pack_rounded<T>(c, d));
  }
}
__device__ inline unsigned shared_address(const void* address) {
  return static_cast<unsigned>(__cvta_generic_to_shared(address));
}
// Load four 8 x 8 matrices of 16-bit values from shared memory. Lanes 8i to 8i + 7 pass the addresses of the rows of
// matrix i. Of each matrix a lane gets two adjacent values of row lane / 4, or of column lane / 4 with load_transposed.
__device__ inline uint4 load_matrices(const void* row) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(shared_address(row)));
  return x;
}
__device__ inline uint4 load_transposed(const void* row) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(shared_address(row)));
  return x;
}
// Asynchronous copies from global to shared memory.
struct AsyncCopies {
  // Copy 16 bytes. If not live, write zeros and read nothing.
  __device__ void copy(void* target, const void* source, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(live ? 16 : 0));
  }
  // Copy four bytes.
  __device__ void copy_word(unsigned* target, const unsigned* source, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)), "l"(source), "r"(live ? 4 : 0));
  }
  // Make one group of the copies that this thread began since the last commit.
  __device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Wait until all but the last COUNT groups have arrived.
  template <int COUNT>
  __device__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory"); }
  // Wait until all copies of this thread have arrived.
  __device__ void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
};
// Return x, of which the compiler then knows nothing: it recomputes what depends on x instead of keeping it in
// registers.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Tell the compiler that x is the same in all lanes of a warp.
__device__ inline int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}
// Multiply without letting the compiler fuse the product with a sum.
__device__ inline float product(float a, float b) {
  return __fmul_rn(a, b);
}
template <int N>
struct Number {
  static constexpr int value = N;
};
#if LATENT
// Barriers and register counts of warpgroups with different work in one thread group.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int COUNT>
__device__ inline void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ inline void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
#else
template <int COUNT>
__device__ inline void fewer_registers() {}
template <int COUNT>
__device__ inline void more_registers() {}
#endif
// Barrier of the 128 threads of one warpgroup.
__device__ inline void warpgroup_barrier(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// An mbarrier in shared memory. A turn ends after `arrivals` arrivals, and the next one begins.
struct Flag {
  unsigned long long bits;
  __device__ void begin(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }
  // Count one arrival for the warp, once all its lanes are here.
  __device__ void arrive(int lane) {
    __syncwarp();
    if (lane == 0) asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(this)) : "memory");
  }
  // Wait for the end of a turn: with 0 of the first, third ... one, with 1 of the second, fourth ... one. Before the
  // first turn has ended, waiting with 1 returns at once.
  __device__ void wait(int turn) {
    unsigned over;
    do {
#if __CUDA_ARCH__ >= 900
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(over) : "r"(shared_address(this)), "r"(turn) : "memory");
#else
      asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(over) : "r"(shared_address(this)), "r"(turn) : "memory");
#endif
    } while (!over);
  }
};
#elif QUANTIZED
// Loads of quantised pages.
__device__ inline unsigned word_of(float x) {
  return __float_as_uint(x);
}
// Return word & mask | bits, in one instruction; the compiler makes two of it if it sees the constants.
__device__ inline unsigned select_bits(unsigned word, unsigned mask, unsigned bits) {
  unsigned x;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(x) : "r"(word), "r"(mask), "r"(bits));
  return x;
}
// Load N words that are read once. WHOLE: the lanes together read whole sectors, so L1 need not keep the rest of one.
template <int N, bool WHOLE>
__device__ inline void stream_words(const unsigned* source, unsigned* target) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 4) {
    const uint4 x = stream_load(source);
    target[0] = x.x, target[1] = x.y, target[2] = x.z, target[3] = x.w;
  } else if constexpr (N == 2) {
    if constexpr (WHOLE) {
      asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(target[0]), "=r"(target[1]) : "l"(source));
    } else {
      asm volatile("ld.global.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(target[0]), "=r"(target[1]) : "l"(source));
    }
  } else {
    if constexpr (WHOLE) {
      asm volatile("ld.global.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(target[0]) : "l"(source));
    } else {
      asm volatile("ld.global.L2::128B.u32 %0, [%1];" : "=r"(target[0]) : "l"(source));
    }
  }
}
__device__ inline unsigned stream_half_word(const unsigned short* source) {
  unsigned short x;
  asm volatile("ld.global.L2::128B.u16 %0, [%1];" : "=h"(x) : "l"(source));
  return x;
}
// Load a row's scales and biases, N words; aligned to 4 words if N is a multiple of 4, to 2 if it is even.
template <int N>
__device__ inline void load_factors(const unsigned* source, unsigned (&target)[N]) {
  constexpr int STEP = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
  for (int i = 0; i < N; i += STEP) {
    if constexpr (STEP == 4) {
      asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(target[i]), "=r"(target[i + 1]), "=r"(target[i + 2]), "=r"(target[i + 3]) : "l"(source + i));
    } else if constexpr (STEP == 2) {
      asm volatile("ld.global.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(target[i]), "=r"(target[i + 1]) : "l"(source + i));
    } else {
      asm volatile("ld.global.L2::128B.u32 %0, [%1];" : "=r"(target[i]) : "l"(source + i));
    }
  }
}
// Return the largest of a simdgroup's numbers, which must not be negative.
__device__ inline float largest_of(float x) {
  unsigned y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(__float_as_uint(x)));
  return __uint_as_float(y);
}
template <class T>
__device__ inline void store_words(T* target, uint4 words) {
  *reinterpret_cast<uint4*>(target) = words;
}
#endif
#elif QUANTIZED

// Portable kernels over quantised pages -----------------------------------------------------------------------------

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
#endif
}  // namespace mlx::core::cu
#if TENSOR
// The launch's dynamic shared memory, which may exceed the 48 KB that a text may declare.
#define SHARED_ARRAY(T, name, size) \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  T* const name = reinterpret_cast<T*>(name##_bytes)
#endif

#define threadgroup_position_in_grid (blockIdx)
#define threadgroups_per_grid (gridDim)
#define thread_position_in_threadgroup (threadIdx)
#define thread_position_in_grid \
  (make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z))
#define thread_index_in_simdgroup (threadIdx.x % 32u)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32u)
#define UNROLL _Pragma("unroll")
#define FUNCTION __device__ inline
#define GLOBAL
// Must come last: __device__ expands to a text with the word device in it.
#define device
#define thread
#define threadgroup __shared__
