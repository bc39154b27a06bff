// Write new rows of keys and values into the pool, in place. Row n = batch * length + position goes to slot slots[n] =
// block * BS + offset; it is skipped if slots[n] < 0.
//   write_slots      (PAGED)      k and v [batch, kv heads, length, head_dim] in any strides
//   quantized_write  (QUANTIZED)  the same, quantised into pages (PageShape)
//   write_rows       (ROWS)       quantised rows [batch, kv heads, length, D or DV words], unchanged; the first KC or VC
//                                 words of a row are codes
// Grid: x = row, KV head, and for pages keys or values; one simdgroup each. (CUDA allows at most 65,535 groups in y; a
// long prompt may have more rows.)
const int n_kv = k_pool_shape[1];
const int length = k_shape[2];
const int lane = static_cast<int>(thread_position_in_grid.x) % 32;
#if PAGED
const int item = static_cast<int>(thread_position_in_grid.x) / 32;
#else
const bool is_value = static_cast<int>(thread_position_in_grid.x) / 32 % 2 != 0;
const int item = static_cast<int>(thread_position_in_grid.x) / 64;
#endif
const int head = item % n_kv;
const int row = item / n_kv;
const int64_t slot = slots[row];

if (static_cast<int>(thread_position_in_grid.x) == 0) {
  fence_out[0] = fence[0] + 1u;
}
// MLX does not know that a kernel writes to its inputs: only the fence orders these stores with every other use.
if (slot >= 0) {
#if PAGED
  auto k_target = const_cast<device T*>(k_pool);
  auto v_target = const_cast<device T*>(v_pool);
  const int64_t at = (slot / BS * n_kv + head) * BS + slot % BS;
  const int64_t k_from = row / length * k_strides[0] + head * k_strides[1] + row % length * k_strides[2];
  const int64_t v_from = row / length * v_strides[0] + head * v_strides[1] + row % length * v_strides[2];
  for (int dim = lane; dim < D; dim += 32) {
    k_target[at * D + dim] = k[k_from + dim * k_strides[3]];
  }
  for (int dim = lane; dim < DV; dim += 32) {
    v_target[at * DV + dim] = v[v_from + dim * v_strides[3]];
  }
#elif QUANTIZED
  const int64_t page = slot / BS * n_kv + head;
  const int at = static_cast<int>(slot % BS);
  if (is_value) {
    constexpr int PAGE = BS * (DV * VBITS / 32 + DV / GS * static_cast<int>(sizeof(T)) / 2);
    const int64_t from = row / length * v_strides[0] + head * v_strides[1] + row % length * v_strides[2];
    for (int group = 0; group < DV / GS; group++) {
      quantize_group<T, VBITS, DV, GS, BS>(v + from, v_strides[3], const_cast<device uint*>(v_pool) + page * PAGE, at, group, lane);
    }
  } else {
    constexpr int PAGE = BS * (D * KBITS / 32 + D / GS * static_cast<int>(sizeof(T)) / 2);
    const int64_t from = row / length * k_strides[0] + head * k_strides[1] + row % length * k_strides[2];
    for (int group = 0; group < D / GS; group++) {
      quantize_group<T, KBITS, D, GS, BS>(k + from, k_strides[3], const_cast<device uint*>(k_pool) + page * PAGE, at, group, lane);
    }
  }
#elif ROWS
  const int words = is_value ? DV : D;
  const int code_words = is_value ? VC : KC;
  const int offset = static_cast<int>(slot % BS);
  auto page = const_cast<device T*>(is_value ? v_pool : k_pool) + (slot / BS * n_kv + head) * (BS * words);
  auto source = (is_value ? v : k) + ((static_cast<int64_t>(row / length) * n_kv + head) * length + row % length) * words;
  for (int i = lane; i < words; i += 32) {
    const int rest = BS * code_words + offset * (words - code_words) + i - code_words;
    page[i < code_words ? offset * code_words + i : rest] = source[i];
  }
#endif
}
