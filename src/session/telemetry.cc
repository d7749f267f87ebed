#include "kvloom/session/telemetry.h"

#include <bit>

namespace kvloom {

// ---- transfers ----

void Telemetry::opened(const TransferKey& key, std::int64_t pages, Instant now) {
  open_[key] = {now, pages, kNever, false};
  if (sinks_.metrics != nullptr) sinks_.metrics->opened();
  log(LogLevel::info, "transfer {}: begins", to_string(key));
}

void Telemetry::granted() {
  if (sinks_.metrics != nullptr) sinks_.metrics->granted();
}

void Telemetry::tail(std::chrono::nanoseconds exposed) {
  if (sinks_.metrics != nullptr) sinks_.metrics->exposed_tail(exposed);
}

void Telemetry::ended(const TransferKey& key, Outcome outcome, const Error& why, Instant now) {
  Open& open = open_[key];
  open.ended = now;
  if (sinks_.metrics != nullptr) sinks_.metrics->ended(outcome, why.code, now - open.begun);
  if (sinks_.trace != nullptr)
    sinks_.trace->span(sinks_.trace->track("transfers"), "transfer",
                       outcome == Outcome::landed ? TraceWord("landed") : TraceWord("not landed"), open.begun, now,
                       {.transfer = key});
  if (outcome == Outcome::landed) return log(LogLevel::info, "transfer {}: landed", to_string(key));
  log(LogLevel::warning, "transfer {}: {}: {}", to_string(key), to_string(outcome), to_string(why));
}

void Telemetry::quarantined(const TransferKey& key) {
  Open& open = open_[key];
  open.quarantined = open.pages > 0;
  if (open.quarantined && sinks_.metrics != nullptr) sinks_.metrics->quarantined(open.pages);
}

void Telemetry::released(const TransferKey& key, Instant now) {
  const auto at = open_.find(key);
  if (at == open_.end()) return;
  const Open& open = at->second;
  if (open.quarantined && sinks_.metrics != nullptr) sinks_.metrics->freed(open.pages, now - open.ended);
  if (open.ended != kNever && now - open.ended > std::chrono::milliseconds(1))
    log(LogLevel::info, "transfer {}: its pages are free after {} ms of quarantine", to_string(key),
        (now - open.ended) / std::chrono::milliseconds(1));
  open_.erase(at);
}

// ---- a source ----

void Telemetry::ready(const TransferKey& key, LayerId layer, std::int64_t tokens, Instant now) {
  if (sinks_.trace == nullptr) return;
  sinks_.trace->instant(sinks_.trace->track("ready"), "ready", "ready", now,
                        {.transfer = key, .layer = layer, .tokens = TokenRange{0, tokens}});
}

void Telemetry::left_queue(std::chrono::nanoseconds waited) {
  if (sinks_.metrics != nullptr) sinks_.metrics->queued(waited);
}

void Telemetry::posted(const TransferKey& key, const Sender::Post& post, std::chrono::nanoseconds since_ready, Instant /*now*/) {
  const std::int64_t runs = std::exchange(runs_, 0);
  if (sinks_.metrics != nullptr) {
    sinks_.metrics->posted(post.bytes, runs, static_cast<std::int64_t>(post.parts.size()));
    sinks_.metrics->ready_to_post(since_ready);
    sinks_.metrics->notice_sent();
  }
  log(LogLevel::debug, "transfer {}: {} layers, {} B in {} runs to decode rank {}{}", to_string(key), post.parts.size(),
      post.bytes.value, runs, post.target.value, post.last ? ", the last" : "");
}

void Telemetry::delivered(const TransferKey& key, const Post& post, Instant now, const std::optional<Error>& error) {
  if (sinks_.metrics != nullptr) {
    if (error)
      sinks_.metrics->undelivered(error->code);
    else
      sinks_.metrics->delivered(post.bytes, now - post.posted);
  }
  if (error)
    log(LogLevel::warning, "transfer {}: a post to decode rank {} did not get there: {}", to_string(key), post.target.value,
        to_string(*error));
  if (sinks_.trace == nullptr) return;
  TraceArgs args{.transfer = key, .layer = {}, .tokens = {}, .bytes = post.bytes};
  if (post.first) {
    args.layer = post.first->layer.layer;
    args.tokens = post.first->chunk;
  }
  sinks_.trace->span(sinks_.trace->track(fmt::format("to decode rank {}", post.target.value)), "post",
                     error ? TraceWord("failed post") : TraceWord("post"), post.posted, now, std::move(args));
}

// ---- a target ----

void Telemetry::layer_landed(const TransferKey& key, LayerId layer, Instant now) {
  log(LogLevel::debug, "transfer {}: layer {} landed", to_string(key), layer.value);
  if (sinks_.trace != nullptr)
    sinks_.trace->instant(sinks_.trace->track("landed"), "landed", "landed", now, {.transfer = key, .layer = layer});
}

void Telemetry::landed(Bytes bytes) {
  if (sinks_.metrics != nullptr) sinks_.metrics->landed(bytes);
}

void Telemetry::noticed() {
  if (sinks_.metrics != nullptr) sinks_.metrics->notice_received();
}

// ---- connections ----

void Telemetry::sent(bool taken) {
  if (sinks_.metrics != nullptr && taken) sinks_.metrics->control_sent();
  if (!taken) log(LogLevel::debug, "a message was lost: its peer is gone, or does not read");
}

void Telemetry::received() {
  if (sinks_.metrics != nullptr) sinks_.metrics->control_received();
}

void Telemetry::connected(const std::string& peer) {
  if (sinks_.metrics != nullptr) sinks_.metrics->partner_up();
  log(LogLevel::info, "{}: connected", peer);
}

void Telemetry::lost(const std::string& peer, const Error& why) {
  if (sinks_.metrics != nullptr) sinks_.metrics->partner_lost(why.code);
  log(LogLevel::warning, "{}: lost: {}", peer, to_string(why));
}

void Telemetry::refused(const std::string& peer, const Error& why) {
  if (sinks_.metrics != nullptr) sinks_.metrics->hello_refused(why.code);
  log(LogLevel::warning, "{}: refused: {}", peer, to_string(why));
}

void Telemetry::geometry_refused(const std::string& peer, const Error& why) {
  if (sinks_.metrics != nullptr) sinks_.metrics->geometry_refused(why.code);
  log(LogLevel::warning, "{}: its geometry is refused: {}", peer, to_string(why));
}

// A peer can send any number of them: the 1st, 2nd, 4th, ... is a line.
void Telemetry::nonsense(const Error& why) {
  if (std::has_single_bit(++nonsense_))
    log(LogLevel::warning, "a peer sent what is no message ({} so far): {}", nonsense_, to_string(why));
}

}  // namespace kvloom
