// session_cast.h: small plans, and the bytes of a fuzzer as choices.  For session_machines_fuzz.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvloom/plan/compile.h"
#include "kvloom/session/message.h"

namespace kvloom::fuzz {

// The bytes, one by one; behind their end all are 0.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : left_(data, size) {}
  bool over() const { return left_.empty(); }
  std::uint8_t byte() {
    if (left_.empty()) return 0;
    const std::uint8_t out = left_.front();
    left_ = left_.subspan(1);
    return out;
  }
  std::size_t below(std::size_t end) { return byte() % end; }  // @pre end > 0
  template <class Container>
  auto& one_of(Container&& from) {
    return from[below(std::size(from))];
  }

 private:
  std::span<const std::uint8_t> left_;
};

struct Known {
  std::shared_ptr<const Plan> plan;
  PlanDigest digest;
};
// Between the same prefill ranks and two groups of decode ranks.
struct Pairing {
  Known plan, other;
};

inline constexpr std::int64_t kPage = 4, kTokens = 21;

inline CacheShape shape_of(std::vector<CacheGroup> groups) { return CacheShape::make("small", 3, std::move(groups)).value(); }

inline Known known(const CacheShape& shape, const char* from, const char* to) {
  const auto side = [&](const char* words) { return Side::make(shape, Sharding::parse(words).value(), kPage).value(); };
  Known out{std::make_shared<const Plan>(compile(side(from), side(to)).value()), {}};
  out.digest = digest_of(*out.plan);
  return out;
}

inline const std::vector<Pairing>& pairings() {
  static const std::vector<Pairing> all = [] {
    const std::vector<LayerId> layers = {LayerId(0), LayerId(1), LayerId(2)};
    const CacheShape mla = shape_of({{"latent", GroupKind::paged, layers, 1, {{"latent", 3, 1}}, {}, {}}});
    const CacheShape gqa = shape_of({{"kv", GroupKind::paged, layers, 2, {{"k", 2, 1}, {"v", 2, 1}}, {}, {}}});
    const CacheShape mixed =
        shape_of({{"full", GroupKind::paged, {LayerId(0)}, 2, {{"k", 2, 1}}, {}, {}},
                  {"sliding", GroupKind::paged, {LayerId(1)}, 2, {{"k", 2, 1}}, Window{Window::Kind::sliding, 7}, {}},
                  {"ssm", GroupKind::state, {LayerId(2)}, 4, {{"state", 3, 1}}, {}, {}}});
    std::vector<Pairing> out;
    const auto add = [&](const CacheShape& shape, const char* from, const char* to, const char* other) {
      out.push_back({known(shape, from, to), known(shape, from, other)});
    };
    add(gqa, "tp=1", "tp=2", "tp=1");
    add(gqa, "tp=2", "tp=1", "tp=2");
    add(mla, "cp=2:layers", "dcp=2", "tp=1");
    add(mla, "cp=3:layers", "tp=1", "dcp=2");
    add(mla, "tp=2", "tp=1", "tp=2");  // a replica that has nothing to send
    add(mixed, "tp=2", "tp=2,page=8", "tp=1");
    add(mla, "tp=1", "dcp=2:value", "tp=1");
    add(mla, "dcp=2:value", "tp=2", "tp=1");
    return out;
  }();
  return all;
}

// Which pages are whose, such a plan does not say.
inline bool is_by_value(const Plan& plan) {
  return std::any_of(plan.groups().begin(), plan.groups().end(), [](const GroupPlan& g) {
    return g.source->tokens.rule == TokenRule::value || g.target->tokens.rule == TokenRule::value;
  });
}

}  // namespace kvloom::fuzz
