#include "kvloom/tools/run_job.h"

#include "kvloom/plan/compile.h"
#include "kvloom/tools/machine.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/rank_memory.h"

namespace kvloom {
namespace {

// The words of a side of `ranks` copies of everything that decode has.
std::string copies(const Job& job, std::int32_t ranks) {
  std::string words = ranks == 1 ? "tp=1" : fmt::format("cp={}", ranks);
  for (const CacheGroup& group : job.shape.groups())
    if (job.decode->find(group.name) == nullptr) words += fmt::format(",{}:none", group.name);
  return words;
}

Expected<std::shared_ptr<const Side>> side_of_copies(const Job& job, std::int32_t ranks) {
  auto sharding = Sharding::parse(copies(job, ranks));
  if (!sharding) return tl::unexpected(sharding.error());
  auto side = Side::make(job.shape, *sharding, job.decode->default_page());
  if (!side) return tl::unexpected(side.error());
  return std::make_shared<const Side>(std::move(*side));
}

Expected<NaiveScheme> make_naive(const Job& job, const Scheme& loom) {
  const auto every = side_of_copies(job, job.decode->ranks()), one = side_of_copies(job, 1);
  if (!every) return tl::unexpected(every.error());
  if (!one) return tl::unexpected(one.error());
  auto send = compile(job.prefill, *every, job.total());
  if (!send) return tl::unexpected(send.error());
  auto keep = compile(*one, job.decode, job.total());
  if (!keep) return tl::unexpected(keep.error());
  auto staging = identity_tables(*send, *job.tokens);
  if (!staging) return tl::unexpected(staging.error());
  auto own = identity_tables(*keep, *job.tokens);
  if (!own) return tl::unexpected(own.error());
  return NaiveScheme{{std::move(*send), {loom.tables.prefill, staging->decode}},
                     {std::move(*keep), {own->prefill, loom.tables.decode}}};
}

Expected<std::int64_t> side_memory(const Scheme& scheme, bool prefill) {
  const std::int32_t ranks = prefill ? scheme.plan.source().ranks() : scheme.plan.target().ranks();
  std::int64_t sum = 0;
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    const auto map = TensorMap::make(scheme.plan, prefill, Rank(rank), prefill ? scheme.tables.prefill : scheme.tables.decode);
    if (!map) return tl::unexpected(map.error());
    const auto next = checked_add(sum, map->length());
    if (!next) return fail(Code::overflow, "the caches of all ranks do not fit 63 bits");
    sum = *next;
  }
  return sum;
}

}  // namespace

Expected<std::int64_t> memory_needed(const RunJob& job) {
  auto prefill = side_memory(job.loom, true), decode = side_memory(job.loom, false);
  if (!prefill) return prefill;
  if (!decode) return decode;
  // Without the naive way: the memory that memcpy is measured from.
  Expected<std::int64_t> staging = job.transport.on_host() ? *decode : 0;
  if (job.naive) staging = side_memory(job.naive->send, false);
  if (!staging) return staging;
  const auto both = checked_add(*prefill, *decode);
  const auto all = both ? checked_add(*both, *staging) : std::nullopt;
  if (!all) return fail(Code::overflow, "the caches of all ranks do not fit 63 bits");
  return *all;
}

Expected<RunJob> make_run_job(const Job& job, const std::string& tables, const TransportWords& transport, bool naive) {
  auto plan = compile(job.prefill, job.decode, job.total());
  if (!plan) return tl::unexpected(plan.error());
  auto made = make_tables(*plan, *job.tokens, tables);
  if (!made) return tl::unexpected(made.error());
  RunJob out{{std::move(*plan), std::move(*made)}, {}, *job.tokens, job.prefix, transport, std::chrono::seconds(120)};
  if (naive) {
    auto scheme = make_naive(job, out.loom);
    if (!scheme) return tl::unexpected(scheme.error());
    out.naive = std::move(*scheme);
  }
  const auto needed = memory_needed(out);
  if (!needed) return tl::unexpected(needed.error());
  const auto usable = read_memory().usable();
  if (usable && *needed > *usable / 10 * 9)
    return fail(Code::exhausted, "the ranks need {} of memory together, of which {} are free: use fewer --tokens{}",
                bytes_text(Bytes(*needed)), bytes_text(Bytes(*usable)), naive ? ", or --no-naive" : "");
  return out;
}

}  // namespace kvloom
