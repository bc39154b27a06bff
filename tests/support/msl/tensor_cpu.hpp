// Emulator: the helpers of text/prelude.cuh that narrow_matmul and narrow_quantized use.
inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return uint4(x, y, z, w); }
template <class T>
inline uint pack(T low, T high) {
  ushort bits[2];
  __builtin_memcpy((void*)&bits[0], (const void*)&low, 2);
  __builtin_memcpy((void*)&bits[1], (const void*)&high, 2);
  return uint(bits[0]) | uint(bits[1]) << 16;
}
template <class T>
inline uint4 load_words(const T* source) {
  return make_uint4(pack(source[0], source[1]), pack(source[2], source[3]), pack(source[4], source[5]), pack(source[6], source[7]));
}
inline uint4 load_words(const uint* source) { return make_uint4(source[0], source[1], source[2], source[3]); }
template <bool VALUE>
struct Case {
  static constexpr bool value = VALUE;
};
template <class T>
inline uint4 stream_load(const T* source) {
  if (reinterpret_cast<uint64_t>(source) % 16) msl_rt::fail("a load of 16 bytes at an odd address");
  return load_words(source);
}
template <class T>
inline uint4 load_aligned(const T* source) { return stream_load(source); }
inline bool is_aligned(const void* address) { return reinterpret_cast<uint64_t>(address) % 16 == 0; }
inline float float_of(uint bits) {
  float value;
  __builtin_memcpy((void*)&value, &bits, 4);
  return value;
}
inline uint word(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
template <class T>
inline float half_of(uint word, int high) {
  const ushort bits = ushort(high ? word >> 16 : word & 0xffff);
  T value;
  __builtin_memcpy((void*)&value, &bits, 2);
  return float(value);
}
struct Fragments {
  uint a[4], b[2];
};
// mma.sync.m16n8k16 as PTX describes its fragments: lane 4r + c holds rows r and r + 8 of a, column r of b, and rows r
// and r + 8, columns 2c and 2c + 1, of d.
template <class T>
MSL_NOSAN inline void mma(float (&d)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, int line = __builtin_LINE()) {
  const auto lanes = metal::msl_gather(Fragments{{a0, a1, a2, a3}, {b0, b1}}, 30, line);
  const uint lane = msl_rt::cur_lane();
  for (uint e = 0; e < 4; e++) {
    const uint row = e / 2, column = lane % 4 * 2 + e % 2;
    for (uint t = 0; t < 4; t++) {
      for (uint k = 0; k < 4; k++) {
        const uint a = lanes.v[lane / 4 * 4 + t].a[k / 2 * 2 + row];
        const uint b = lanes.v[column * 4 + t].b[k / 2];
        d[e] += half_of<T>(a, k % 2) * half_of<T>(b, k % 2);
      }
    }
  }
}
template <class T>
inline uint pack_rounded(float low, float high) { return pack(static_cast<T>(low), static_cast<T>(high)); }
template <class T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<half> = true;
inline uint word_of(float x) {
  uint bits;
  __builtin_memcpy((void*)&bits, &x, 4);
  return bits;
}
// Round to odd first, so that rounding twice gives the same as rounding once.
template <class T>
inline ushort fma_of(ushort a, ushort b, ushort c) {
  const double exact = double(half_of<T>(a, 0)) * half_of<T>(b, 0) + half_of<T>(c, 0);
  float x = float(exact);
  if (double(x) != exact && !(word_of(x) & 1)) x = float_of(word_of(x) + ((double(x) > exact) == (x > 0) ? -1 : 1));
  const T rounded = static_cast<T>(x);
  ushort bits;
  __builtin_memcpy((void*)&bits, (const void*)&rounded, 2);
  return bits;
}
template <class T>
inline uint fma2(uint a, uint b, uint c) {
  return uint(fma_of<T>(a >> 16, b >> 16, c >> 16)) << 16 | fma_of<T>(a & 0xffff, b & 0xffff, c & 0xffff);
}
inline float byte_of(uint x, int i) { return float(x >> 8 * i & 255); }
inline uint low_halves(uint a, uint b) { return (a & 0xffffu) | b << 16; }
inline uint high_halves(uint a, uint b) { return a >> 16 | (b & 0xffff0000u); }
template <class T>
inline float low_of(uint x) { return half_of<T>(x, 0); }
template <class T>
inline float high_of(uint x) { return half_of<T>(x, 1); }
inline float product(float a, float b) { return a * b; }
inline int opaque(int x) { return x; }
inline int uniform(int x) { return x; }
template <int N>
struct Number {
  static constexpr int value = N;
};
#define SHARED_ARRAY(T, name, size) MSL_TG(T, name, [size])
// ldmatrix as PTX describes it. Each lane loads the values that it gets, so that races are detected.
template <class T>
inline uint4 matrices(const T* row, bool transposed, int op, int line) {
  const auto rows = metal::msl_gather(row, op, line);
  const uint lane = msl_rt::cur_lane();
  uint words[4];
  for (uint i = 0; i < 4; i++) {
    const T* low = transposed ? rows.v[i * 8 + lane % 4 * 2] + lane / 4 : rows.v[i * 8 + lane / 4] + lane % 4 * 2;
    const T* high = transposed ? rows.v[i * 8 + lane % 4 * 2 + 1] + lane / 4 : low + 1;
    words[i] = pack(*low, *high);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
template <class T>
inline uint4 load_matrices(const T* row, int line = __builtin_LINE()) { return matrices(row, false, 31, line); }
template <class T>
inline uint4 load_transposed(const T* row, int line = __builtin_LINE()) { return matrices(row, true, 32, line); }
// Copies arrive when the thread waits; until then the target holds NaN. Every source address must be readable, even if
// nothing is copied from it.
struct AsyncCopies {
  static constexpr int MOST = 256, MOST_GROUPS = 8;
  struct Eight {
    ushort bits[8];
  };
  Eight* targets[MOST];
  const Eight* sources[MOST];
  int count = 0, ends[MOST_GROUPS], n_groups = 0;
  uint* words[MOST];
  const uint* word_sources[MOST];
  int n_words = 0;
  template <class T>
  void copy(T* target, const T* source, bool live) {
    targets[count] = reinterpret_cast<Eight*>(target);
    sources[count] = live ? reinterpret_cast<const Eight*>(source) : nullptr;
    volatile ushort readable = reinterpret_cast<const Eight*>(source)->bits[0];
    for (int i = 0; i < 8; i++) targets[count]->bits[i] = 0xffff;
    count++;
  }
  void copy_word(uint* target, const uint* source, bool live) {
    words[n_words] = target;
    word_sources[n_words++] = live ? source : nullptr;
    volatile uint there = *source;
    *target = 0xffffffff;
  }
  void commit() { ends[n_groups++] = count; }
  template <int COUNT>
  void wait_for_all_but() {
    const int gone = n_groups > COUNT ? n_groups - COUNT : 0;
    if (gone == 0) return;
    const int there = ends[gone - 1];
    arrive(there);
    n_groups -= gone;
    for (int i = 0; i < n_groups; i++) ends[i] = ends[i + gone] - there;
    for (int i = 0; i < count - there; i++) targets[i] = targets[i + there], sources[i] = sources[i + there];
    count -= there;
  }
  void wait() {
    for (int i = 0; i < n_words; i++) *words[i] = word_sources[i] ? *word_sources[i] : 0;
    arrive(count);
    count = n_groups = n_words = 0;
  }
  void arrive(int until) {
    for (int i = 0; i < until; i++) {
      for (int j = 0; j < 8; j++) targets[i]->bits[j] = sources[i] ? sources[i]->bits[j] : 0;
    }
  }
};
