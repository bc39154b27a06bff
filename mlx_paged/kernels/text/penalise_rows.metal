// Add one token to the history of each row with penalties, and write the logits with its penalties. Logits of other
// rows are copied unchanged.
// A row's history has an entry per token: the token id (in the code: word), how often it occurs in each of three
// windows (counts 0 to 2), and whether the entry is the last one of its id (count 3). Only last entries write a logit.
// spans: number of entries of the row, and the length of each window. penalties: repetition, presence, frequency.
// Grid: x = row and chunk of CW of its logits; SG simdgroups. A thread group writes the logits of its chunk; that of
// the first chunk also writes the history.
constexpr int AHEAD = 8;  // logits in flight

threadgroup float tg_best[3 * SG];

const int vocab = x_shape[1];
const int num_rows = words_shape[0];
const int room = words_shape[1];
const int chunks = (vocab + CW - 1) / CW;
const int row = static_cast<int>(threadgroup_position_in_grid.x) / chunks;
const int begin = static_cast<int>(threadgroup_position_in_grid.x) % chunks * CW;
const int end = metal::min(begin + CW, vocab);
const int64_t start = static_cast<int64_t>(row) * vocab;
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int thread_ = sg * 32 + lane;
const int place = places[row];

for (int i = begin + thread_; i < end; i += 32 * SG * AHEAD) {
  T values[AHEAD];
  UNROLL
  for (int j = 0; j < AHEAD; j++) {
    values[j] = x[start + metal::min(i + 32 * SG * j, end - 1)];
  }
  UNROLL
  for (int j = 0; j < AHEAD; j++) {
    if (i + 32 * SG * j < end) {
      out[start + i + 32 * SG * j] = static_cast<float>(values[j]);
    }
  }
}
if (place >= 0) {
  const uint token = tokens[row];
  const int length = spans[place * 8];
  const int first = place * room;
  const int plane = num_rows * room;
  float best[3] = {0.0f, 0.0f, 0.0f};
  for (int entry = thread_; entry < room; entry += 32 * SG) {
    const bool is_same = words[first + entry] == token;
    UNROLL
    for (int kind = 0; kind < 3; kind++) {
      best[kind] = is_same ? metal::max(best[kind], static_cast<float>(counts[kind * plane + first + entry])) : best[kind];
    }
  }
  UNROLL
  for (int kind = 0; kind < 3; kind++) {
    const float most = simd_max(best[kind]);
    if (lane == 0) {
      tg_best[kind * SG + sg] = most;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  int now[3];     // occurrences of the token in each window, this one included
  bool goes[3];   // whether a token drops out of the window, and which
  uint gone[3];
  UNROLL
  for (int kind = 0; kind < 3; kind++) {
    now[kind] = static_cast<int>(simd_max(lane < SG ? tg_best[kind * SG + lane] : 0.0f)) + 1;
    const int left = length - spans[place * 8 + 1 + kind];
    goes[kind] = left >= 0;
    gone[kind] = words[first + metal::max(left, 0)];
  }
  const float repetition = penalties[place * 8];
  const float presence = penalties[place * 8 + 1];
  const float frequency = penalties[place * 8 + 2];
  for (int entry = thread_; entry < room; entry += 32 * SG) {
    const uint word = entry == length ? token : words[first + entry];
    const bool is_same = word == token;
    int count[3];
    UNROLL
    for (int kind = 0; kind < 3; kind++) {
      count[kind] = is_same ? now[kind] : counts[kind * plane + first + entry];
      count[kind] -= goes[kind] && word == gone[kind] ? 1 : 0;
    }
    const int is_last = is_same ? (entry == length ? 1 : 0) : counts[3 * plane + first + entry];
    if (begin == 0) {
      words_out[first + entry] = word;
      UNROLL
      for (int kind = 0; kind < 3; kind++) {
        counts_out[kind * plane + first + entry] = count[kind];
      }
      counts_out[3 * plane + first + entry] = is_last;
    }
    const int at = static_cast<int>(word);
    if (is_last == 1 && at >= begin && at < end) {
      float value = static_cast<float>(x[start + at]);
      const float repeated = value > 0.0f ? value / repetition : value * repetition;
      value = count[0] > 0 ? repeated : value;
      value = count[1] > 0 ? value - presence : value;
      out[start + at] = value - frequency * static_cast<float>(count[2]);
    }
  }
  if (begin == 0 && thread_ < 8) {
    spans_out[place * 8 + thread_] = spans[place * 8 + thread_] + (thread_ == 0 ? 1 : 0);
  }
}
