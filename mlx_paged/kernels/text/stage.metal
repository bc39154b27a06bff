// Metal: helpers of the matrix kernels that dequantise into threadgroup memory.

// Dequantise the eight codes from 8 * at on of a row into threadgroup memory, with the same bits as quantized_gather.
template <typename T, int BITS, int DIM, int GS, int BS>
inline void stage_codes(const device uint* pool, int64_t page, int slot, int at, threadgroup T* target) {
  constexpr int CODES = DIM * BITS / 32;  // words of a row
  constexpr int GROUPS = DIM / GS;
  const device uint* codes = pool + page * (BS * (CODES + 2 * GROUPS * static_cast<int>(sizeof(T)) / 4));
  const device T* factors = reinterpret_cast<const device T*>(codes + BS * CODES) + slot * 2 * GROUPS;
  const T scale = factors[at * 8 / GS];
  const T bias = factors[GROUPS + at * 8 / GS];
  uint words[BITS / 4];
  load_words<BITS / 4>(codes + slot * CODES + at * (BITS / 4), words);
  UNROLL
  for (int j = 0; j < 8; j++) {
    target[j] = dequantized(scale, words[j * BITS / 32] >> (j * BITS % 32) & ((1u << BITS) - 1u), bias);
  }
}
