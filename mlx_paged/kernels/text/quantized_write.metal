// Quantise new key and value rows into pages of the pool, in place (PageShape describes a page). k, v and slots as in
// write_slots.
// Grid: x = row, KV head, keys or values; one simdgroup each.
constexpr int PER = GS / 32;
const int n_kv = k_pool_shape[1];
const int length = k_shape[2];
const int item = static_cast<int>(thread_position_in_grid.x) / 32;
const int lane = static_cast<int>(thread_position_in_grid.x) % 32;
const bool is_value = item % 2 != 0;
const int head = item / 2 % n_kv;
const int row = item / 2 / n_kv;
const int64_t slot = static_cast<int64_t>(static_cast<S>(slots[row]));  // S: each type of slots has its own text

if (item + lane == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (slot >= 0) {
  const int bits = is_value ? VBITS : KBITS;
  const int groups = is_value ? DV / GS : D / GS;
  const int code_words = groups * GS * bits / 32;
  const int64_t page_words = BS * (code_words + 2 * groups * static_cast<int>(sizeof(T)) / 4);
  const int offset = static_cast<int>(slot % BS);
  // MLX does not know that a kernel writes to its inputs: only the fence orders this store with every other use.
  auto page = const_cast<device uint*>(is_value ? v_pool : k_pool) + (slot / BS * n_kv + head) * page_words;
  auto codes = page + offset * code_words;
  auto factors = reinterpret_cast<device T*>(page + BS * code_words) + offset * 2 * groups;
  auto source = is_value ? v : k;
  const int64_t batch_stride = is_value ? v_strides[0] : k_strides[0];
  const int64_t head_stride = is_value ? v_strides[1] : k_strides[1];
  const int64_t row_stride = is_value ? v_strides[2] : k_strides[2];
  const int64_t stride = is_value ? v_strides[3] : k_strides[3];
  const int64_t from = row / length * batch_stride + head * head_stride + row % length * row_stride;
  for (int group = 0; group < groups; group++) {
    const int first = group * GS + lane * PER;
    float x[PER];
    UNROLL
    for (int i = 0; i < PER; i++) {
      x[i] = static_cast<float>(source[from + (first + i) * stride]);
    }
    store_group<T, PER>(x, bits, group, groups, lane, codes, factors);
  }
}
