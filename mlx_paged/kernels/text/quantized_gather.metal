// Dequantise the token range [span[0], span[0] + span[1]) of one block table into contiguous [kv heads, length,
// head_dim].
// Grid: x = one thread per packet of 4 values of one head's rows (rounded up), y = KV head, z = keys or values.
constexpr int WIDE = (D > DV ? D : DV) / 4;
const int n_kv = k_pool_shape[1];
const int head = static_cast<int>(thread_position_in_grid.y);
const bool is_value = thread_position_in_grid.z != 0;
const int64_t item = static_cast<int64_t>(thread_position_in_grid.x);
const int64_t i = item / WIDE;
const int first = static_cast<int>(item % WIDE) * 4;
const int length = span[1];
const int dim = is_value ? DV : D;

if (head == 0 && item == 0 && !is_value) {
  fence_out[0] = fence[0] + 1u;
}
if (i < length && first < dim) {
  const int bits = is_value ? VBITS : KBITS;
  const int groups = dim / GS;
  const int code_words = dim * bits / 32;
  const int64_t page_words = BS * (code_words + 2 * groups * static_cast<int>(sizeof(T)) / 4);
  const int64_t position = span[0] + i;
  const int64_t block = blocks[position / BS];
  const int offset = static_cast<int>(position % BS);
  auto page = (is_value ? v_pool : k_pool) + (block * n_kv + head) * page_words;
  auto factors = reinterpret_cast<const device T*>(page + BS * code_words) + offset * 2 * groups;
  const uint word = page[offset * code_words + first * bits / 32] >> (first * bits % 32);
  const T scale = factors[first / GS];
  const T bias = factors[groups + first / GS];
  const uint most = (1u << bits) - 1u;
  Packet<T, 4> packet;
  UNROLL
  for (int j = 0; j < 4; j++) {
    set_packet<T, 4>(packet, j, dequantized(scale, word >> (bits * j) & most, bias));
  }
  store_packet<T, 4>((is_value ? v_out : k_out) + (static_cast<int64_t>(head) * length + i) * dim + first, packet);
}
