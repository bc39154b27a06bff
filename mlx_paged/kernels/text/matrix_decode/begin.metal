// Metal only: attention as in decode/begin, by 8 x 8 matrices: the G query heads of a KV head are the rows of RT matrices, so a
// key or value is read, and dequantised, once for all of them. Same grid, results and partial results; SG simdgroups share the
// tokens of a partition, KEYS at a time. Head G and those after it are rows of zeros.
typedef simdgroup_matrix<T, 8, 8> Matrix;
typedef simdgroup_matrix<float, 8, 8> Sums;
constexpr int RT = (G + 7) / 8;
constexpr int LINES = 8 * RT;
constexpr int SHARE = KEYS / 4;  // scores of a row that a lane takes
constexpr float NOTHING = -1.0e30f;
constexpr float LOG2E = 1.44269504088896341f;
threadgroup T own_queries[LINES * D];
threadgroup float scores[SG * LINES * KEYS];
threadgroup T weights[SG * LINES * KEYS];
threadgroup float diagonals[SG * RT * 64];
threadgroup float tg_m[SG * LINES];
threadgroup float tg_l[SG * LINES];

const int n_kv = static_cast<int>(threadgroups_per_grid.x);
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int kv_head = static_cast<int>(threadgroup_position_in_grid.x);
const int query_row = static_cast<int>(threadgroup_position_in_grid.y);
const int partition = static_cast<int>(threadgroup_position_in_grid.z);
const int n_partitions = static_cast<int>(threadgroups_per_grid.z);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int sequence = query_row / q_len;
// The first of this kv head's lines; a line is one (sequence, query head, query position) of q and out.
const int64_t line0 = static_cast<int64_t>(sequence * n_kv + kv_head) * G * q_len + query_row % q_len;

const int begin = metal::max(static_cast<int>(starts[query_row]), 0);
const int end = static_cast<int>(ends[query_row]);
// A row that ends at most FIRST tokens after its first partition begins has that one alone: such launches need no merge.
const bool is_short = FIRST > 0 && end - first_partition<PART>(begin) <= FIRST;
const int size = is_short ? FIRST : partition_size<PART, SPAN>(end - begin);
const int origin = first_partition<PART>(begin);
const int lo = metal::max(begin, origin + partition * size);
const int hi = metal::min(end, origin + partition * size + size);
// With params[2] set (q_len is 1 then), the row's newest token comes with the call; the thread group whose partition it is in
// stores it into its slot, and reads it there.
const int fresh = params[2] != 0.0f ? end - 1 : -1;
const int64_t fresh_row = static_cast<int64_t>(query_row) * n_kv + kv_head;

if (kv_head + query_row + partition + lane + sg == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (lo >= hi) {
  // Nothing visible here: merge_partitions never reads such a partition, a row that sees nothing at all gets zeros.
  for (int item = sg * 32 + lane; item < G * DV; item += SG * 32) {
    const int64_t at = (line0 + item / DV * q_len) * n_partitions + partition;
    if (item % DV == 0) {
      stats[at * 2] = NOTHING;
      stats[at * 2 + 1] = 0.0f;
    }
    if (SINGLE) {
      out[at * DV + item % DV] = static_cast<O>(0.0f);
    }
  }
  return;
}

threadgroup float* const own_scores = scores + sg * LINES * KEYS;
threadgroup T* const own_weights = weights + sg * LINES * KEYS;
threadgroup float* const diagonal = diagonals + sg * RT * 64;
const auto table = tables + static_cast<int64_t>(sequence) * max_blocks;
const int row = lane / 4;
const int part = lane % 4;
const int own = hi - 1, from = lo;  // the last and the first token that all rows see
const float gain = SOFTCAP ? 1.0f : params[0] * LOG2E;
for (int item = sg * 32 + lane; item < LINES * D; item += SG * 32) {
  const int head = item / D;
  own_queries[item] = head < G ? q[(line0 + head * q_len) * D + item % D] : static_cast<T>(0.0f);
}
for (int i = lane; i < RT * 64; i += 32) {
  diagonal[i] = 0.0f;
}
