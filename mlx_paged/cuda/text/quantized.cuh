//// codes
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
//// tensor_loads
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
//// tensor_codes
// CUDA only: codes of quantised keys and values as factors for the tensor cores.
// A code becomes the low bits of a float16 without a shift: with the exponent of 1024 bit 0 counts 1, with that of 64
// bit 4 does. So a factor is the code plus an offset of 1024 or 64. The sums are corrected by the offset times the sum
// of the other factors.
using Half = __half;
constexpr unsigned ONES = 0x64006400u, SIXTEENTHS = 0x54005400u;
constexpr float OFFSET = 1024.0f;
// Kinds of pairs, by their offset: two at 4 bits, one at 8 bits.
template <int BITS>
constexpr int KINDS = BITS == 4 ? 2 : 1;
template <int BITS>
__device__ inline float offset_of(int kind) {
  return BITS == 4 && kind == 1 ? 64.0f : OFFSET;
}
// Make four pairs of eight consecutive codes, in one or two words: 0 1, 2 3, 4 5, 6 7 at 8 bits, and 0 4, 1 5, 2 6, 3 7
// at 4 bits. Pairs 1 and 3 are of the second kind.
template <int BITS>
__device__ inline void code_pairs(const unsigned* words, unsigned (&pairs)[4]) {
  if constexpr (BITS == 8) {
    for (int i = 0; i < 4; i++) pairs[i] = __byte_perm(words[i / 2], ONES, i % 2 ? 0x7372 : 0x7170);
  } else {
    const unsigned later = words[0] >> 8;
    pairs[0] = select_bits(words[0], 0x000f000fu, ONES);
    pairs[1] = select_bits(words[0], 0x00f000f0u, SIXTEENTHS);
    pairs[2] = select_bits(later, 0x000f000fu, ONES);
    pairs[3] = select_bits(later, 0x00f000f0u, SIXTEENTHS);
  }
}
// Return which of eight values is the first or the second of pair i.
template <int BITS>
__device__ inline constexpr int pair_member(int i, int second) {
  return BITS == 8 ? i * 2 + second : i + second * 4;
}
// Make pairs of four consecutive codes of two tokens, one code of each per pair. The codes are a word at 8 bits, and a
// half (0 or 1) of a word at 4 bits. Pairs 1 and 3 are of the second kind.
template <int BITS>
__device__ inline void token_pairs(unsigned first, unsigned second, int half, unsigned (&pairs)[4]) {
  if constexpr (BITS == 8) {
    const unsigned low = __byte_perm(first, second, 0x5140), high = __byte_perm(first, second, 0x7362);
    for (int i = 0; i < 4; i++) pairs[i] = __byte_perm(i / 2 ? high : low, ONES, i % 2 ? 0x7372 : 0x7170);
  } else {
    const unsigned both = __byte_perm(first, second, half ? 0x7632 : 0x5410);
    code_pairs<4>(&both, pairs);
  }
}
// Dequantise eight consecutive codes, in one or two words, into pairs in order: scale * code + bias, rounded once to T
// like mx.dequantize. Words `scale` and `bias` hold their value twice.
template <class T, int BITS>
__device__ inline void value_pairs(const unsigned* words, unsigned scale, unsigned bias, unsigned (&pairs)[4]) {
  constexpr unsigned ONE = is_half<T> ? 0x3c003c00u : 0x3f803f80u;
  for (int i = 0; i < 4; i++) {
    unsigned codes;
    if constexpr (BITS == 4) {
      // The high code of a byte is at bit 4, or at bit 3 for bfloat16, which has fewer bits.
      constexpr unsigned MASK = is_half<T> ? 0x00f0000fu : 0x0078000fu;
      constexpr unsigned EXPONENTS = is_half<T> ? 0x54006400u : 0x41804300u;  // 64 and 1024, 16 and 128
      constexpr unsigned OFFSETS = is_half<T> ? 0xd400e400u : 0xc180c300u;
      const unsigned both = __byte_perm(words[0], is_half<T> ? words[0] : words[0] >> 1, 0x4400 + i * 0x1111);
      codes = fma2<T>(select_bits(both, MASK, EXPONENTS), ONE, OFFSETS);
    } else if constexpr (is_half<T>) {
      codes = fma2<T>(__byte_perm(words[i / 2], ONES, i % 2 ? 0x7372 : 0x7170), ONE, 0xe400e400u);
    } else {
      // Codes as the low bits of a float of exponent 23.
      const float low = float_of(__byte_perm(words[i / 2], 0x4b000000u, 0x7440 + i % 2 * 2));
      const float high = float_of(__byte_perm(words[i / 2], 0x4b000000u, 0x7441 + i % 2 * 2));
      codes = pack_rounded<T>(low - 8388608.0f, high - 8388608.0f);
    }
    pairs[i] = fma2<T>(codes, scale, bias);
  }
}
// Return a word with one half of a word twice.
__device__ inline unsigned both_halves(unsigned word, int high) {
  return __byte_perm(word, 0, high ? 0x3232 : 0x1010);
}
// Return the low or the high value in a word.
template <class T>
__device__ inline float value_of(unsigned word, int high) {
  const unsigned short bits = high ? word >> 16 : word;
  T value;
  memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
// Return the scale for lane c's columns, which belong to one of a product's PG groups side by side. If `first` is the
// number of groups, return its bias.
template <class T, int PG, int N>
__device__ inline float factor_of(const unsigned (&factors)[N], int first, int product, int c) {
  const int at = first + product * PG;
  if constexpr (PG == 1) {
    return value_of<T>(factors[at / 2], at % 2);
  } else if constexpr (PG == 2) {
    return value_of<T>(factors[at / 2], c / 2);
  } else {
    return value_of<T>(c < 2 ? factors[at / 2] : factors[at / 2 + 1], c % 2);
  }
}
// Powers of two that scale numbers of magnitude `most` or less to less than 2^15, and back.
__device__ inline unsigned exponent_of(float most) {
  const unsigned exponent = word_of(most) >> 23;
  return exponent < 15u ? 15u : exponent;
}
__device__ inline float to_half_range(unsigned exponent) {
  return float_of((268u - exponent) << 23);
}
__device__ inline float from_half_range(unsigned exponent) {
  return float_of((exponent - 14u) << 23);
}
// Return 2^(from - to), or 0 if that is below the range of floats.
__device__ inline float power_of_two(unsigned from, unsigned to) {
  return to - from < 127u ? float_of((127u + from - to) << 23) : 0.0f;
}
//// tensor_quantize
// CUDA only: quantise a row of keys or values into a page, with the bits of quantized_write. A group takes eight of the
// warp's lanes.
template <class T, int BITS, int DIM, int GS, int BS>
__device__ inline void quantize_row(const T* row, unsigned* page, int at, int lane) {
  constexpr int GROUPS_OF_ROW = DIM / GS;
  constexpr int SHARE = GS / 8;
  constexpr float MOST = (1 << BITS) - 1;
  T* factors = reinterpret_cast<T*>(page + BS * (DIM * BITS / 32)) + at * (2 * GROUPS_OF_ROW);
  for (int first = 0; first < GROUPS_OF_ROW; first += 4) {
    const int group = first + lane / 8;
    const bool live = group < GROUPS_OF_ROW;
    const int dim = (live ? group : 0) * GS + lane % 8 * SHARE;
    float x[SHARE];
    float low = float_of(0x7f800000u), high = 0.0f;
    for (int i = 0; i < SHARE; i++) {
      x[i] = static_cast<float>(row[dim + i]);
      low = metal::min(low, x[i]);
      high = metal::max(high, x[i]);
    }
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      low = metal::min(low, simd_shuffle_xor(low, lanes));
      high = metal::max(high, simd_shuffle_xor(high, lanes));
    }
    const Affine affine = affine_of(low, high, BITS);
    if (live) {
      if (lane % 8 == 0) {
        factors[group] = static_cast<T>(affine.scale);
        factors[GROUPS_OF_ROW + group] = static_cast<T>(affine.bias);
      }
      for (int i = 0; i < SHARE; i += 4) {
        unsigned codes = 0;
        for (int j = 0; j < 4; j++) {
          codes |= static_cast<unsigned>(metal::min(metal::round((x[i + j] - affine.bias) / affine.scale), MOST)) << j * BITS;
        }
        const int four = (at * DIM + dim + i) / 4;
        if (BITS == 8) {
          page[four] = codes;
        } else {
          reinterpret_cast<unsigned short*>(page)[four] = codes;
        }
      }
    }
  }
}
