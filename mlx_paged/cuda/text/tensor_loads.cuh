// CUDA only: loads of quantised pages.
namespace metal {
__device__ inline float round(float x) { return ::roundf(x); }
}  // namespace metal
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
// Asynchronous copies, and a function to call as soon as those of this thread have arrived.
template <class Then>
struct CopiesThen : AsyncCopies {
  Then act;
  __device__ CopiesThen(Then what) : act(what) {}
  // Copy four bytes.
  __device__ void copy_word(unsigned* target, const unsigned* source, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)), "l"(source), "r"(live ? 4 : 0));
  }
  __device__ void wait() {
    AsyncCopies::wait();
    act();
  }
};
template <class Then>
__device__ inline CopiesThen<Then> then(Then what) {
  return CopiesThen<Then>(what);
}
