// Copy the token range [span[0], span[0] + span[1]) of one block table into contiguous [kv heads, length, head_dim].
//   gather_blocks     (PAGED)      keys and values, in packets of 4 elements
//   quantized_gather  (QUANTIZED)  dequantised keys and values, in packets of 4
//   gather_rows       (ROWS)       quantised rows of D or DV words, unchanged, by words; the first KC or VC are codes
// Grid: x = one thread per packet of one head's rows (rounded up), y = KV head, z = for pages keys or values.
const int n_kv = k_pool_shape[1];
const int head = static_cast<int>(thread_position_in_grid.y);
const int64_t item = static_cast<int64_t>(thread_position_in_grid.x);
const int length = span[1];
constexpr int WIDE = D > DV ? D : DV;
#if ROWS
constexpr int PACKET = 1;
#else
constexpr int PACKET = 4;
#endif
const int64_t i = item / (WIDE / PACKET);
const int first = static_cast<int>(item % (WIDE / PACKET)) * PACKET;
#if PAGED
const bool is_value = false;  // a thread copies both
#else
const bool is_value = thread_position_in_grid.z != 0;
const int dim = is_value ? DV : D;
#endif

if (head == 0 && item == 0 && !is_value) {
  fence_out[0] = fence[0] + 1u;
}
if (i < length) {
  const int64_t position = span[0] + i;
  const int64_t block = blocks[position / BS];
  const int64_t to = static_cast<int64_t>(head) * length + i;
#if PAGED
  const int64_t from = (block * n_kv + head) * BS + position % BS;
  if (first < D) {
    store_packet<T, 4>(k_out + to * D + first, load_packet<T, 4>(k_pool + from * D + first));
  }
  if (first < DV) {
    store_packet<T, 4>(v_out + to * DV + first, load_packet<T, 4>(v_pool + from * DV + first));
  }
#else
  const int offset = static_cast<int>(position % BS);
#if QUANTIZED
  if (first < dim) {
    const int bits = is_value ? VBITS : KBITS;
    const int groups = dim / GS;
    const int code_words = dim * bits / 32;
    const int64_t page_words = BS * (code_words + 2 * groups * static_cast<int>(sizeof(T)) / 4);
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
    store_packet<T, 4>((is_value ? v_out : k_out) + to * dim + first, packet);
  }
#elif ROWS
  if (first < dim) {
    const int code_words = is_value ? VC : KC;
    const int rest = BS * code_words + offset * (dim - code_words) + first - code_words;
    auto page = (is_value ? v_pool : k_pool) + (block * n_kv + head) * (BS * dim);
    (is_value ? v_out : k_out)[to * dim + first] = page[first < code_words ? offset * code_words + first : rest];
  }
#endif
#endif
}
