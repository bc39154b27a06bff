// Metal only: causal attention of the new tokens of several sequences, of any lengths, over block tables, by 8 x 8 matrices.
// A thread group takes one KV head and one tile: up to 8 * SG / G new tokens of one sequence, times the G query heads of the
// KV head. Row n of the tile is head n % G of token n / G. A simdgroup takes 8 rows and works for itself: it waits for no
// other. Keys and values come from the pool straight into matrices, since 8 tokens never lie in two blocks. How lanes hold a
// matrix is not specified, so scores pass through threadgroup memory, and sums are rescaled by a diagonal matrix.
// Tiles start at a sequence's first new token and keys at multiples of KEYS, so a row's bits do not depend on the pack.
typedef simdgroup_matrix<T, 8, 8> Matrix;
typedef simdgroup_matrix<float, 8, 8> Sums;
constexpr int PART = KEYS / 4;  // scores of a row that a lane takes
constexpr float NOTHING = -1.0e30f;
constexpr float LOG2E = 1.44269504088896341f;
threadgroup T queries[8 * SG * D];
threadgroup float scores[8 * SG * KEYS];
threadgroup T weights[8 * SG * KEYS];
threadgroup float diagonals[64 * SG];
threadgroup T edges[64 * SG];

const int n_kv = k_pool_shape[1];
const int unit = static_cast<int>(threadgroup_position_in_grid.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int own_group = static_cast<int>(simdgroup_index_in_threadgroup);
const int kv_head = unit % n_kv;
const auto tile = tiles + unit / n_kv * 4;
const auto table = tables + static_cast<int64_t>(tile[0]) * tables_shape[1];
const int first_row = tile[1];  // of the tile's tokens, in the pack
const int origin = tile[2];     // position of the first
const int n_tokens = tile[3];
const int first_line = own_group * 8;
if (unit + own_group + lane == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (first_line >= n_tokens * G) return;

threadgroup T* const own_queries = queries + first_line * D;
threadgroup float* const own_scores = scores + first_line * KEYS;
threadgroup T* const own_weights = weights + first_line * KEYS;
threadgroup float* const diagonal = diagonals + own_group * 64;
threadgroup T* const edge = edges + own_group * 64;
const int row = lane / 4;
const int part = lane % 4;
const int window = static_cast<int>(params[2]);
const int stride = static_cast<int>(params[3]);
// What a token sees: at most `window` tokens, itself included, from a multiple of the stride on.
const int own = origin + metal::min((first_line + row) / G, n_tokens - 1);
const int from = (metal::max(own - window + 1, 0) + stride - 1) / stride * stride;
const int low = origin + first_line / G;
const int lo = (metal::max(low - window + 1, 0) + stride - 1) / stride * stride;
const int hi = origin + metal::min((first_line + 7) / G, n_tokens - 1) + 1;
const float gain = SOFTCAP ? 1.0f : params[0] * LOG2E;
const int64_t line = (static_cast<int64_t>(first_row + own - origin) * n_kv + kv_head) * G + (first_line + row) % G;
const device T* const k_head = k_pool + static_cast<int64_t>(kv_head) * (BS * D);
const device T* const v_head = v_pool + static_cast<int64_t>(kv_head) * (BS * DV);

for (int i = part * 4; i < D; i += 16) {
  const Packet<T, 4> packet = load_packet<T, 4>(q + line * D + i);
  UNROLL
  for (int j = 0; j < 4; j++) {
    own_queries[row * D + i + j] = packet.part[0][j];
  }
}
diagonal[lane * 2] = 0.0f;
diagonal[lane * 2 + 1] = 0.0f;
simdgroup_barrier(mem_flags::mem_threadgroup);

float m = NOTHING, l = 0.0f;  // of the lane's row; the sum is of the lane's scores
Sums acc[DV / 8];
UNROLL
for (int v = 0; v < DV / 8; v++) {
  acc[v] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int step = lo / KEYS; step <= (hi - 1) / KEYS; step++) {
  Sums s[KEYS / 8];
  const device T* key[KEYS / 8];
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    s[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    // Eight tokens that no row sees are those next to them: the mask takes their scores away.
    const int token = metal::min(metal::max(step * KEYS + j * 8, lo / 8 * 8), (hi - 1) / 8 * 8);
    key[j] = k_head + static_cast<int64_t>(table[token / BS]) * n_kv * (BS * D) + token % BS * D;
  }
  UNROLL
  for (int d = 0; d < D / 8; d++) {
    Matrix query;
    simdgroup_load(query, own_queries + d * 8, D);
    UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      Matrix k;
      simdgroup_load(k, key[j] + d * 8, D, ulong2(0), true);
      simdgroup_multiply_accumulate(s[j], query, k, s[j]);
    }
  }
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    simdgroup_store(s[j], own_scores + j * 8, KEYS);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  float x[PART];
  float top = m;
  UNROLL
  for (int i = 0; i < PART; i++) {
    const int token = step * KEYS + part * PART + i;
    x[i] = own_scores[row * KEYS + part * PART + i];
    if (token > own || token < from) {
      x[i] = NOTHING;
    } else if (SOFTCAP) {
      // The hyperbolic tangent, to some 1e-7.
      const float e = metal::fast::exp2(metal::min(x[i] * (params[0] / params[1] * 2.0f * LOG2E), 64.0f));
      x[i] = (1.0f - metal::fast::divide(2.0f, 1.0f + e)) * (params[1] * LOG2E);
    }
    top = metal::max(top, x[i]);
  }
  top = metal::max(top, simd_shuffle_xor(top, 1));
  top = metal::max(top, simd_shuffle_xor(top, 2));
  // A row may see nothing yet: then the difference of its scores to the largest is not 0 but rounding.
  const float base = top == NOTHING ? 0.0f : top * gain;
  const float shrink = metal::fast::exp2(metal::fma(m, gain, -base));
  m = top;
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < PART; i++) {
    const float weight = metal::fast::exp2(metal::fma(x[i], gain, -base));
    sum += weight;
    own_weights[row * KEYS + part * PART + i] = static_cast<T>(weight);
  }
  l = metal::fma(l, shrink, sum);
  if (part == 0) {
    diagonal[row * 9] = shrink;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  // Most steps have no larger score than those before.
  if (simd_any(shrink != 1.0f)) {
    Sums shrinks, scaled;
    simdgroup_load(shrinks, diagonal, 8);
    UNROLL
    for (int v = 0; v < DV / 8; v++) {
      simdgroup_multiply(scaled, shrinks, acc[v]);
      acc[v] = scaled;
    }
  }

  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    const int token = step * KEYS + j * 8;
    if (token + 8 > lo && token < hi) {
      const device T* const value =
          v_head + static_cast<int64_t>(table[token / BS]) * n_kv * (BS * DV) + token % BS * DV;
      // Slots that no row sees may hold anything, and a weight of zero does not make a NaN go away.
      const bool whole = token >= lo && token + 8 <= hi;
      const bool live = token + row >= lo && token + row < hi;
      Matrix weight;
      simdgroup_load(weight, own_weights + j * 8, KEYS);
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
        simdgroup_multiply_accumulate(acc[v], weight, values, acc[v]);
      }
    }
  }
}

l += simd_shuffle_xor(l, 1);
l += simd_shuffle_xor(l, 2);
float scale = metal::fast::divide(1.0f, l);
if (SINKS) {
  const float sink = static_cast<float>(sinks[kv_head * G + (first_line + row) % G]) * LOG2E;
  const float top = metal::max(m * gain, sink);
  const float weight = metal::fast::exp2(m * gain - top);
  scale = metal::fast::divide(weight, metal::fma(l, weight, metal::fast::exp2(sink - top)));
}
UNROLL
for (int v = 0; v < DV / 8; v += KEYS / 8) {
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    if (v + j < DV / 8) simdgroup_store(acc[v + j], own_scores + j * 8, KEYS);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (first_line + row < n_tokens * G) {
    UNROLL
    for (int i = 0; i < PART; i++) {
      const int at = v * 8 + part * PART + i;
      if (at < DV) out[line * DV + at] = static_cast<T>(own_scores[row * KEYS + part * PART + i] * scale);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
