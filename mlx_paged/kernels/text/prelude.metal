// Metal dialect: what the kernel bodies need beyond MSL and MLX's own preamble.
#define FUNCTION inline
#define UNROLL _Pragma("clang loop unroll(full)")
// Return which of OWNERS lanes holds number n if lane bit 0 stands for the top bit of n, lane bit 1 for the next, and
// so on.
#define SCORE_OWNER(n, OWNERS) \
  ((((n) & 1) << 4 | ((n) & 2) << 2 | ((n) & 4) | ((n) & 8) >> 2 | ((n) & 16) >> 4) / (32 / (OWNERS)))

// N elements of T loaded together; converted only when they are used.
template <typename T, int N>
struct Packet {
  metal::vec<T, 4> part[N / 4];
};

template <typename T, int N, typename P>
inline Packet<T, N> load_packet(P source) {
  Packet<T, N> packet;
  UNROLL
  for (int i = 0; i < N / 4; i++) {
    packet.part[i] = *reinterpret_cast<const device metal::vec<T, 4>*>(source + 4 * i);
  }
  return packet;
}

template <typename T, int N>
inline Packet<T, N> zero_packet() {
  Packet<T, N> packet;
  UNROLL
  for (int i = 0; i < N / 4; i++) {
    packet.part[i] = metal::vec<T, 4>(static_cast<T>(0.0f));
  }
  return packet;
}

template <typename T, int N, typename P>
inline void store_packet(P target, Packet<T, N> packet) {
  UNROLL
  for (int i = 0; i < N / 4; i++) {
    *reinterpret_cast<device metal::vec<T, 4>*>(target + 4 * i) = packet.part[i];
  }
}

template <typename T, int N>
inline float packet_value(Packet<T, N> packet, int i) {
  return static_cast<float>(packet.part[i / 4][i % 4]);
}

#if QUANTIZED
// Quantised pages.
inline float float_of(uint bits) { return as_type<float>(bits); }

// Return the value of a code, as MLX's dequantising kernel computes it.
template <typename T>
inline T dequantized(T scale, uint code, T bias) {
  return static_cast<T>(scale * static_cast<uint8_t>(code) + bias);
}

template <typename T, int N>
inline void set_packet(thread Packet<T, N>& packet, int i, T value) {
  packet.part[i / 4][i % 4] = value;
}

// Load one word, or two that are aligned to 8 bytes.
template <int N, typename P>
inline void load_words(P source, thread uint* words) {
  if (N == 1) {
    words[0] = source[0];
  } else {
    const uint2 pair = *reinterpret_cast<const device uint2*>(source);
    words[0] = pair.x;
    words[N - 1] = pair.y;
  }
}
#endif
