// Metal only: attention as in decode.metal, with 8 x 8 matrices, over pages not quantised (PAGED) or quantised. The G
// query heads of a KV head are the rows of RT matrices, so a key or value is read, and dequantised, once for all of them.
// Grid, results and partial results are the same; SG simdgroups split the tokens of a partition, KEYS at a time. Rows G
// and after are zeros.
// Join a simdgroup's maximum and sum of weights of a row into those of the simdgroups before it. The outputs
// before are to be multiplied by `kept`, its own by `added`.
struct JoinWeights {
  float kept, added;
};

inline JoinWeights join(thread float& top, thread float& total, float m, float l) {
  const float larger = metal::max(top, m);
  const JoinWeights by = {metal::fast::exp2(top - larger), metal::fast::exp2(m - larger)};
  total = metal::fma(l, by.added, total * by.kept);
  top = larger;
  return by;
}
#if QUANTIZED
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
#endif

#pragma kernel
#if PAGED
threadgroup T edges[64 * SG];
#elif QUANTIZED
// Each simdgroup dequantises its own tokens.
threadgroup T staged[SG * KEYS * (D > DV ? D : DV)];
threadgroup T* const own_staged = staged + simdgroup_index_in_threadgroup * (KEYS * (D > DV ? D : DV));
#endif
// A thread group handles a partition of one row.
const int query_row = static_cast<int>(threadgroup_position_in_grid.y);
const int partition = static_cast<int>(threadgroup_position_in_grid.z);
const int n_partitions = static_cast<int>(threadgroups_per_grid.z);
typedef simdgroup_matrix<T, 8, 8> Matrix;
typedef simdgroup_matrix<float, 8, 8> Sums;
constexpr int RT = (G + 7) / 8;
constexpr int LINES = 8 * RT;
constexpr int SHARE = KEYS / 4;  // scores of a row per lane
constexpr float NOTHING = -1.0e30f;
threadgroup T queries[LINES * D];
threadgroup float scores[SG * LINES * KEYS];
threadgroup T weights[SG * LINES * KEYS];
threadgroup float diagonals[SG * RT * 64];
threadgroup float tg_m[SG * LINES];
threadgroup float tg_l[SG * LINES];

const int n_kv = static_cast<int>(threadgroups_per_grid.x);
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int kv_head = static_cast<int>(threadgroup_position_in_grid.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int sequence = query_row / q_len;
// The first line of this KV head; a line is one (sequence, query head, query position) of q and out.
const int64_t line0 = static_cast<int64_t>(sequence * n_kv + kv_head) * G * q_len + query_row % q_len;

const int begin = metal::max(static_cast<int>(starts[query_row]), 0);
const int end = static_cast<int>(ends[query_row]);
const Partitions partitions = partitions_of<PART, SPAN, FIRST>(begin, end);
const int size = partitions.size;
const int lo = metal::max(begin, partitions.origin + partition * size);
const int hi = metal::min(end, partitions.origin + partition * size + size);
// If params[2] is set (only with q_len 1), k_new and v_new hold the row's newest token. The thread group of its
// partition stores it in its slot and reads it there.
const int fresh = params[2] != 0.0f ? end - 1 : -1;
const int64_t fresh_row = static_cast<int64_t>(query_row) * n_kv + kv_head;

if (kv_head + static_cast<int>(threadgroup_position_in_grid.y + threadgroup_position_in_grid.z) + lane + sg == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (lo >= hi) {
  // No visible token: merge_partitions never reads such a partition, and a row that sees no token gets zeros.
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
const int own = hi - 1, from = lo;  // last and first visible token, of all rows
const float gain = SOFTCAP ? 1.0f : params[0] * LOG2E;
for (int item = sg * 32 + lane; item < LINES * D; item += SG * 32) {
  const int head = item / D;
  queries[item] = head < G ? q[(line0 + head * q_len) * D + item % D] : static_cast<T>(0.0f);
}
for (int i = lane; i < RT * 64; i += 32) {
  diagonal[i] = 0.0f;
}
#if PAGED
// Each pool is written and read through one pointer: a compiler may assume that memory reached through one buffer
// argument, or through a const one, is not written through another.
device T* const k_pages = const_cast<device T*>(k_pool);
device T* const v_pages = const_cast<device T*>(v_pool);
if (fresh >= lo && fresh < hi) {
  const int64_t at = (static_cast<int64_t>(table[fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
  for (int dim = sg * 32 + lane; dim < D; dim += SG * 32) {
    k_pages[at * D + dim] = k_new[fresh_row * D + dim];
  }
  for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
    v_pages[at * DV + dim] = v_new[fresh_row * DV + dim];
  }
  threadgroup_barrier(mem_flags::mem_device);
}
#elif QUANTIZED
  constexpr int K_CODES = D * KBITS / 32;
  constexpr int V_CODES = DV * VBITS / 32;
  constexpr int K_GROUPS = D / GS;
  constexpr int V_GROUPS = DV / GS;
  constexpr int FACTOR = static_cast<int>(sizeof(T));
  constexpr int K_PAGE = BS * (K_CODES + K_GROUPS * FACTOR / 2);
  constexpr int V_PAGE = BS * (V_CODES + V_GROUPS * FACTOR / 2);
  // Each pool is written and read through one pointer: a compiler may assume that memory reached through one buffer
  // argument, or through a const one, is not written through another.
  auto k_pages = const_cast<device uint*>(k_pool);
  auto v_pages = const_cast<device uint*>(v_pool);
  if (fresh >= lo && fresh < hi) {
    const int64_t page = static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * n_kv + kv_head;
    for (int group = sg; group < K_GROUPS + V_GROUPS; group += SG) {
      if (group < K_GROUPS) {
        quantize_group<T, KBITS, D, GS, BS>(k_new + fresh_row * D, 1, k_pages + page * K_PAGE, fresh % BS, group, lane);
      } else {
        quantize_group<T, VBITS, DV, GS, BS>(v_new + fresh_row * DV, 1, v_pages + page * V_PAGE, fresh % BS, group - K_GROUPS, lane);
      }
    }
    // The token is read below as its page holds it, so wait for the stores of this thread group.
    threadgroup_barrier(mem_flags::mem_device);
  }
#endif
threadgroup_barrier(mem_flags::mem_threadgroup);

float m[RT], l[RT];  // of the lane's rows; sums over the lane's scores
UNROLL
for (int r = 0; r < RT; r++) {
  m[r] = NOTHING;
  l[r] = 0.0f;
}
Sums acc[RT * (DV / 8)];
UNROLL
for (int v = 0; v < RT * (DV / 8); v++) {
  acc[v] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int step = lo / KEYS + sg; step <= (hi - 1) / KEYS; step += SG) {
  // Scores of KEYS tokens for RT times 8 rows.
#if PAGED
  const device T* const k_head = k_pages + static_cast<int64_t>(kv_head) * (BS * D);
  const device T* key[KEYS / 8];
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    // Eight tokens that no row sees are replaced by the nearest eight that some row sees: the mask drops their scores.
    const int token = metal::min(metal::max(step * KEYS + j * 8, lo / 8 * 8), (hi - 1) / 8 * 8);
    key[j] = k_head + static_cast<int64_t>(table[token / BS]) * n_kv * (BS * D) + token % BS * D;
  }
#elif QUANTIZED
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = lane; i < KEYS * (D / 8); i += 32) {
    const int position = metal::min(metal::max(step * KEYS + i / (D / 8), lo), hi - 1);
    const int64_t page = static_cast<int64_t>(table[position / BS]) * n_kv + kv_head;
    stage_codes<T, KBITS, D, GS, BS>(k_pages, page, position % BS, i % (D / 8), own_staged + i * 8);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup T* key[KEYS / 8];
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    key[j] = own_staged + j * 8 * D;
  }
#endif
  Sums s[RT * (KEYS / 8)];
  UNROLL
  for (int j = 0; j < RT * (KEYS / 8); j++) {
    s[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  UNROLL
  for (int d = 0; d < D / 8; d++) {
    Matrix query[RT];
    UNROLL
    for (int r = 0; r < RT; r++) {
      simdgroup_load(query[r], queries + r * 8 * D + d * 8, D);
    }
    UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      Matrix k;
      simdgroup_load(k, key[j] + d * 8, D, ulong2(0), true);
      UNROLL
      for (int r = 0; r < RT; r++) {
        simdgroup_multiply_accumulate(s[r * (KEYS / 8) + j], query[r], k, s[r * (KEYS / 8) + j]);
      }
    }
  }
  UNROLL
  for (int j = 0; j < RT * (KEYS / 8); j++) {
    simdgroup_store(s[j], own_scores + j / (KEYS / 8) * 8 * KEYS + j % (KEYS / 8) * 8, KEYS);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  bool grows = false;  // some row has a new maximum
  UNROLL
  for (int r = 0; r < RT; r++) {
    const int at = (r * 8 + row) * KEYS + part * SHARE;
    float x[SHARE];
    float top = m[r];
    UNROLL
    for (int i = 0; i < SHARE; i++) {
      const int token = step * KEYS + part * SHARE + i;
      x[i] = own_scores[at + i];
      if (token > own || token < from) {
        x[i] = NOTHING;
      } else if (SOFTCAP) {
        // The hyperbolic tangent, with an error of about 1e-7.
        const float e = metal::fast::exp2(metal::min(x[i] * (params[0] / params[1] * 2.0f * LOG2E), 64.0f));
        x[i] = (1.0f - metal::fast::divide(2.0f, 1.0f + e)) * (params[1] * LOG2E);
      }
      top = metal::max(top, x[i]);
    }
    top = metal::max(top, simd_shuffle_xor(top, 1));
    top = metal::max(top, simd_shuffle_xor(top, 2));
    // If a row has seen no token yet, score * gain - top * gain is a rounding error of huge numbers: weights could be
    // infinite.
    const float base = top == NOTHING ? 0.0f : top * gain;
    const float shrink = metal::fast::exp2(metal::fma(m[r], gain, -base));
    m[r] = top;
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < SHARE; i++) {
      const float weight = metal::fast::exp2(metal::fma(x[i], gain, -base));
      sum += weight;
      own_weights[at + i] = static_cast<T>(weight);
    }
    l[r] = metal::fma(l[r], shrink, sum);
    if (part == 0) {
      diagonal[r * 64 + row * 9] = shrink;
    }
    grows = grows || shrink != 1.0f;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  // Most steps raise no maximum.
  if (simd_any(grows)) {
    UNROLL
    for (int r = 0; r < RT; r++) {
      Sums shrinks, scaled;
      simdgroup_load(shrinks, diagonal + r * 64, 8);
      UNROLL
      for (int v = 0; v < DV / 8; v++) {
        simdgroup_multiply(scaled, shrinks, acc[r * (DV / 8) + v]);
        acc[r * (DV / 8) + v] = scaled;
      }
    }
  }

#if PAGED
  const device T* const v_head = v_pages + static_cast<int64_t>(kv_head) * (BS * DV);
  threadgroup T* const edge = edges + sg * 64;
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    const int token = step * KEYS + j * 8;
    if (token + 8 > lo && token < hi) {
      const device T* const value =
          v_head + static_cast<int64_t>(table[token / BS]) * n_kv * (BS * DV) + token % BS * DV;
      // Slots that no row sees may hold NaN, and NaN times a weight of 0 is NaN.
      const bool whole = token >= lo && token + 8 <= hi;
      const bool live = token + row >= lo && token + row < hi;
      Matrix weight[RT];
      UNROLL
      for (int r = 0; r < RT; r++) {
        simdgroup_load(weight[r], own_weights + r * 8 * KEYS + j * 8, KEYS);
      }
      UNROLL
      for (int v = 0; v < DV / 8; v++) {
        Matrix values;
        if (whole) {
          simdgroup_load(values, value + v * 8, DV);
        } else {
          const int at = row * DV + v * 8 + part * 2;
          edge[lane * 2] = live ? value[at] : static_cast<T>(0.0f);
          edge[lane * 2 + 1] = live ? value[at + 1] : static_cast<T>(0.0f);
          simdgroup_barrier(mem_flags::mem_threadgroup);
          simdgroup_load(values, edge, 8);
          simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL
        for (int r = 0; r < RT; r++) {
          simdgroup_multiply_accumulate(acc[r * (DV / 8) + v], weight[r], values, acc[r * (DV / 8) + v]);
        }
      }
    }
  }
#elif QUANTIZED
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = lane; i < KEYS * (DV / 8); i += 32) {
    const int position = metal::min(metal::max(step * KEYS + i / (DV / 8), lo), hi - 1);
    const int64_t page = static_cast<int64_t>(table[position / BS]) * n_kv + kv_head;
    stage_codes<T, VBITS, DV, GS, BS>(v_pages, page, position % BS, i % (DV / 8), own_staged + i * 8);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    Matrix weight[RT];
    UNROLL
    for (int r = 0; r < RT; r++) {
      simdgroup_load(weight[r], own_weights + r * 8 * KEYS + j * 8, KEYS);
    }
    UNROLL
    for (int v = 0; v < DV / 8; v++) {
      Matrix values;
      simdgroup_load(values, own_staged + j * 8 * DV + v * 8, DV);
      UNROLL
      for (int r = 0; r < RT; r++) {
        simdgroup_multiply_accumulate(acc[r * (DV / 8) + v], weight[r], values, acc[r * (DV / 8) + v]);
      }
    }
  }
#endif
}

UNROLL
for (int r = 0; r < RT; r++) {
  l[r] += simd_shuffle_xor(l[r], 1);
  l[r] += simd_shuffle_xor(l[r], 2);
  if (part == 0) {
    tg_m[sg * LINES + r * 8 + row] = m[r] * gain;
    tg_l[sg * LINES + r * 8 + row] = l[r];
  }
}
// Join the results of the simdgroups, KEYS elements of the values at a time, in the memory of the scores.
UNROLL
for (int v = 0; v < DV / 8; v += KEYS / 8) {
  UNROLL
  for (int j = 0; j < RT * (KEYS / 8); j++) {
    const int column = v + j % (KEYS / 8);
    if (column < DV / 8) {
      simdgroup_store(acc[j / (KEYS / 8) * (DV / 8) + column], own_scores + j / (KEYS / 8) * 8 * KEYS + j % (KEYS / 8) * 8, KEYS);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int item = sg * 32 + lane; item < G * KEYS; item += SG * 32) {
    const int head = item / KEYS;
    const int dim = v * 8 + item % KEYS;
    if (dim < DV) {
      float top = NOTHING, total = 0.0f, o = 0.0f;
      UNROLL
      for (int s = 0; s < SG; s++) {
        const JoinWeights by = join(top, total, tg_m[s * LINES + head], tg_l[s * LINES + head]);
        o = metal::fma(scores[s * LINES * KEYS + item], by.added, o * by.kept);
      }
      const float sink = SINKS ? static_cast<float>(sinks[kv_head * G + head]) * LOG2E : 0.0f;
      const int64_t at = (line0 + head * q_len) * n_partitions + partition;
      store_result<O, DV, SINGLE, SINKS>(out, stats, at, dim, top, total, o, sink);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
