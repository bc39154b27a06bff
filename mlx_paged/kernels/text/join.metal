// Metal: join a simdgroup's maximum and sum of weights of a row into those of the simdgroups before it. The outputs
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
