// Sample one token (in the code: word) per row at its temperature, from the tokens that its top-p, min-p and top-k
// keep. If the scale is 0, take the first token with the largest logit.
// Tokens are ordered by logit, equal ones by id, and the filters keep the beginning of that order. The first token is
// drawn from all. If the filters drop it, they drop all after it too, and the next one is drawn from those before it.
// The token that passes is distributed exactly as if drawn from the tokens kept.
// params: log2(e) / temperature, top-p, log(min-p), top-k, tokens that min-p always keeps, whether any filter is set.
// Grid: x = row; SG simdgroups, each with a part of the vocabulary; a lane has AHEAD logits in flight. Token column +
// 32 * (line + 32 * n) of a simdgroup's part belongs to its lane `column`.
constexpr float FLOOR = -2.0e38f;   // below every logit
constexpr float LEAST = -1.0e38f;   // smaller logits are raised to this; their weight is 0
constexpr float MIN_POWER = -200.0f;
constexpr uint MOST = 1024u;        // limit of draws; at most 1 + 1/2 + ... + 1/vocab are expected, about 12

threadgroup float tg_weight[SG];
threadgroup float tg_mass[SG];
threadgroup float tg_count[SG];
threadgroup float tg_value[1];
threadgroup int tg_word[1];

const int row = static_cast<int>(threadgroup_position_in_grid.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int vocab = x_shape[1];
const int64_t start = static_cast<int64_t>(row) * vocab;
const int part = (vocab + SG * 32 - 1) / (SG * 32) * 32;
const int begin = sg * part;
const int end = metal::min(begin + part, vocab);
const float scale = params[row * 8];
const float top_p = params[row * 8 + 1];
const float log_min_p = params[row * 8 + 2];
const float top_k = params[row * 8 + 3];
const float min_kept = params[row * 8 + 4];
const bool is_limited = params[row * 8 + 5] > 0.0f;

float best = FLOOR;
int place = 0;
for (int i = begin + lane; i < end; i += 32 * AHEAD) {
  float values[AHEAD];
  UNROLL
  for (int j = 0; j < AHEAD; j++) {
    values[j] = i + 32 * j < end ? static_cast<float>(x[start + i + 32 * j]) : FLOOR;
  }
  UNROLL
  for (int j = 0; j < AHEAD; j++) {
    const float value = i + 32 * j < end ? metal::min(metal::max(values[j], LEAST), -LEAST) : FLOOR;
    place = value > best ? i + 32 * j : place;
    best = metal::max(value, best);
  }
}
const float highest = simd_max(best);
const float first = -simd_max(best == highest ? -static_cast<float>(place) : FLOOR);
if (lane == 0) {
  tg_weight[sg] = highest;
  tg_count[sg] = first;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const float top = simd_max(lane < SG ? tg_weight[lane] : FLOOR);
const bool has_top = lane < SG ? tg_weight[lane] == top : false;
int word = static_cast<int>(-simd_max(has_top ? -tg_count[lane] : FLOOR));
threadgroup_barrier(mem_flags::mem_threadgroup);

float pivot = FLOOR;  // logit of the last token drawn
float all = 0.0f;     // weight of all tokens at temperature 1, for top-p
for (uint attempt = 0u; attempt < MOST && scale > 0.0f; attempt++) {
  // Over the tokens before the last one drawn: weight, number, and the weight at temperature 1 of those with a larger
  // logit.
  float weight = 0.0f;
  float count = 0.0f;
  float mass = 0.0f;
  for (int i = begin + lane; i < end; i += 32 * AHEAD) {
    float values[AHEAD];
    float largest = LEAST;
    UNROLL
    for (int j = 0; j < AHEAD; j++) {
      values[j] = i + 32 * j < end ? static_cast<float>(x[start + i + 32 * j]) : LEAST;
    }
    UNROLL
    for (int j = 0; j < AHEAD; j++) {
      values[j] = metal::min(metal::max(values[j], LEAST), -LEAST);
      largest = metal::max(values[j], largest);
    }
    if (largest < pivot) {
      continue;  // true of most tokens once one has been drawn
    }
    UNROLL
    for (int j = 0; j < AHEAD; j++) {
      const float value = values[j];
      const bool is_above = value > pivot && i + 32 * j < end;
      const bool is_before = is_above || (value == pivot && i + 32 * j < metal::min(word, end));
      weight += is_before ? metal::fast::exp2(metal::max((value - top) * scale, MIN_POWER)) : 0.0f;
      count += is_before ? 1.0f : 0.0f;
      if (top_p < 1.0f) {
        mass += is_above ? metal::fast::exp2(metal::max((value - top) * LOG2E, MIN_POWER)) : 0.0f;
      }
    }
  }
  const float part_weight = simd_sum(weight);
  const float part_count = simd_sum(count);
  const float part_mass = simd_sum(mass);
  if (lane == 0) {
    tg_weight[sg] = part_weight;
    tg_count[sg] = part_count;
    tg_mass[sg] = part_mass;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float num_before = simd_sum(lane < SG ? tg_count[lane] : 0.0f);
  const float above = simd_sum(lane < SG ? tg_mass[lane] : 0.0f);
  if (attempt == 0u) {
    all = above;
  } else {
    const bool in_top_p = top_p >= 1.0f || above < top_p * all;
    const bool in_min_p = pivot >= top + log_min_p || num_before < min_kept;
    if (num_before == 0.0f || (in_top_p && in_min_p && num_before < top_k)) {
      break;
    }
  }

  // Threefry-2x32 with 20 rounds: four random numbers from the row's key, position and attempt.
  uint numbers[4];
  UNROLL
  for (int half_ = 0; half_ < 2; half_++) {
    const int turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint schedule[3] = {keys[row * 8], keys[row * 8 + 1], 0x1BD11BDAu ^ keys[row * 8] ^ keys[row * 8 + 1]};
    uint left = positions[row] + schedule[0];
    uint right = 2u * attempt + static_cast<uint>(half_) + schedule[1];
    UNROLL
    for (int i = 0; i < 20; i++) {
      left += right;
      right = ((right << turns[i % 8]) | (right >> (32 - turns[i % 8]))) ^ left;
      if (i % 4 == 3) {
        left += schedule[(i / 4 + 1) % 3];
        right += schedule[(i / 4 + 2) % 3] + static_cast<uint>(i / 4 + 1);
      }
    }
    numbers[2 * half_] = left;
    numbers[2 * half_ + 1] = right;
  }

  // Draw a simdgroup's part, one of its columns, a line of that column, and a token, each with a random number of its
  // own. So sums stay short, and float32 does not lose unlikely tokens.
  int chosen = 0;
  int column = 0;
  int line = 0;
  for (int level = 0; level < 4 && (level == 0 || chosen == sg); level++) {
    float own = level == 0 ? (lane < SG ? tg_weight[lane] : 0.0f) : level == 1 ? weight : 0.0f;
    if (level > 1) {
      const int from = begin + column + 32 * (level == 2 ? lane : line + 32 * lane);
      for (int i = from; i < end && (level == 2 || i == from); i += 1024) {
        const float value = metal::min(metal::max(static_cast<float>(x[start + i]), LEAST), -LEAST);
        const bool is_before = value > pivot || (value == pivot && i < word);
        own += is_before ? metal::fast::exp2(metal::max((value - top) * scale, MIN_POWER)) : 0.0f;
      }
    }
    float sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const float before = simd_shuffle(sum, static_cast<ushort>(lane < step ? lane : lane - step));
      sum += lane < step ? 0.0f : before;
    }
    const uint bits = level == 0 ? numbers[0] : level == 1 ? numbers[1] : level == 2 ? numbers[2] : numbers[3];
    const float target = static_cast<float>(bits >> 8) * 5.9604644775390625e-8f * simd_shuffle(sum, static_cast<ushort>(31));
    const float hit = simd_max(own > 0.0f && sum > target ? static_cast<float>(32 - lane) : 0.0f);
    const float last = simd_max(own > 0.0f ? static_cast<float>(lane) : 0.0f);  // if rounding leaves no sum above it
    const int found = hit > 0.0f ? 32 - static_cast<int>(hit) : static_cast<int>(last);
    if (level == 0) {
      chosen = found;
    } else if (level == 1) {
      column = found;
    } else if (level == 2) {
      line = found;
    } else if (lane == found) {
      const int at = metal::min(begin + column + 32 * (line + 32 * lane), vocab - 1);
      tg_word[0] = at;
      tg_value[0] = metal::min(metal::max(static_cast<float>(x[start + at]), LEAST), -LEAST);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  word = tg_word[0];
  pivot = tg_value[0];
  if (!is_limited) {
    break;
  }
}
if (lane == 0 && sg == 0) {
  out[row] = static_cast<O>(word);
}
