#include "kvloom/landing/coverage.h"

namespace kvloom {

Expected<Coverage> Coverage::make(const std::vector<Owed>& owed) {
  Coverage out;
  for (const Owed& debt : owed) {
    if (debt.bytes < Bytes(0))
      return fail(Code::invalid_argument, "prefill rank {} owes {} B", debt.source.value, debt.bytes.value);
    if (debt.bytes == Bytes(0)) continue;
    const auto sum = checked_add(out.expected_.value, debt.bytes.value);
    if (!sum) return fail(Code::overflow, "the debts of all ranks do not fit 63 bits");
    out.expected_ = Bytes(*sum);
    out.open_[{debt.layer, debt.source}] += debt.bytes;
  }
  out.owed_ = out.open_;
  return out;
}

Expected<void> Coverage::landed(Rank source, CacheLayer layer, Bytes bytes) {
  const auto at = open_.find({layer, source});
  const Bytes left = at == open_.end() ? Bytes(0) : at->second;
  if (bytes < Bytes(0) || bytes > left) {
    const auto owed = owed_.find({layer, source});
    return fail(Scope::transfer, Code::out_of_range,
                "prefill rank {} says that {} B of group {} layer {} landed, but it owes {} B, {} of them still", source.value,
                bytes.value, layer.group, layer.layer.value, owed == owed_.end() ? 0 : owed->second.value, left.value);
  }
  covered_ += bytes;
  if (at == open_.end()) return {};
  at->second -= bytes;
  if (at->second == Bytes(0)) open_.erase(at);
  return {};
}

bool Coverage::complete(CacheLayer layer) const {
  const auto at = open_.lower_bound({layer, Rank(INT32_MIN)});
  return at == open_.end() || at->first.first != layer;
}

std::string Coverage::missing() const {
  std::map<Rank, std::pair<int, Bytes>> by_source;  // layers and bytes
  for (const auto& [key, bytes] : open_) {
    auto& [layers, sum] = by_source[key.second];
    ++layers;
    sum += bytes;
  }
  std::string text;
  for (const auto& [source, left] : by_source)
    text +=
        fmt::format("{}prefill rank {}: {} layers, {} B", text.empty() ? "" : "; ", source.value, left.first, left.second.value);
  return text;
}

}  // namespace kvloom
