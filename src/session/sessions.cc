#include "kvloom/session/sessions.h"

namespace kvloom {
namespace {

template <class Ended>
Expected<void> layer_of(const Expected<typename Ledger<Ended>::Entry>& entry, LayerId layer) {
  if (!entry) return tl::unexpected(entry.error());
  if (entry->layers.contains(layer) || entry->ended->outcome == Outcome::landed) return {};
  return tl::unexpected(entry->ended->why);
}

template <class Ended>
auto layer_or_end(LayerId layer) {
  return [layer](const typename Ledger<Ended>::Entry& entry) { return entry.ended || entry.layers.contains(layer); };
}

constexpr auto kEnded = [](const auto& entry) { return entry.ended.has_value(); };
constexpr auto kReleased = [](const auto& entry) { return entry.released; };

// What happened, into the ledger.
template <class Layer, class Ended, class Events>
void note_all(Ledger<Ended>& ledger, Events& events) {
  for (auto& event : events) {
    if (const auto* layer = std::get_if<Layer>(&event))
      ledger.change(layer->key, [&](auto& entry) { entry.layers.insert(layer->layer); });
    else if (auto* ended = std::get_if<Ended>(&event))
      ledger.change(ended->key, [&](auto& entry) { entry.ended = std::move(*ended); });
    else
      std::visit([&](const auto& what) { ledger.change(what.key, [](auto& entry) { entry.released = true; }); }, event);
  }
  ledger.tell();
}

}  // namespace

// ---- source ----

Expected<std::unique_ptr<SourceSession>> SourceSession::make(SourceOptions options, Transport& transport, LocalCache cache,
                                                             Sinks sinks, Heard<SourceEvent> heard) {
  auto endpoint = SourceEndpoint::make(std::move(options), transport, std::move(cache), std::move(sinks));
  if (!endpoint) return tl::unexpected(endpoint.error());
  return std::unique_ptr<SourceSession>(new SourceSession(std::move(*endpoint), transport, std::move(heard)));
}

SourceSession::SourceSession(std::unique_ptr<SourceEndpoint> endpoint, Transport& transport, Heard<SourceEvent> heard)
    : address_(endpoint->address()),
      heard_(std::move(heard)),
      thread_(std::move(endpoint), transport, [this](std::vector<SourceEvent>& events) { note(events); }) {}

void SourceSession::note(std::vector<SourceEvent>& events) {
  if (heard_) heard_(events);
  note_all<LayerReleased>(ledger_, events);
}

std::size_t SourceSession::open() {
  return thread_.ask([](SourceEndpoint& endpoint) { return endpoint.open(); });
}

SourceEndpoint::Counts SourceSession::counts() {
  return thread_.ask([](SourceEndpoint& endpoint) { return endpoint.counts(); });
}

Expected<void> SourceSession::offer(const Offer& offer) {
  return thread_.ask([&](SourceEndpoint& endpoint) {
    auto ok = endpoint.offer(offer);
    if (ok) ledger_.open(offer.key);
    return ok;
  });
}

Expected<void> SourceSession::set_table(const TransferKey& key, std::int32_t group, CacheTable table) {
  return thread_.ask([&](SourceEndpoint& endpoint) { return endpoint.set_table(key, group, std::move(table)); });
}

void SourceSession::ready(const TransferKey& key, LayerId layer, std::int64_t tokens, std::shared_ptr<DeviceWork> after) {
  thread_.post([=, after = std::move(after)](SourceEndpoint& endpoint) { endpoint.ready(key, layer, tokens, after); });
}

Expected<void> SourceSession::payload(const TransferKey& key, std::vector<std::byte> bytes) {
  return thread_.ask([&](SourceEndpoint& endpoint) { return endpoint.payload(key, std::move(bytes)); });
}

void SourceSession::run_on_thread(const std::function<void()>& work) {
  thread_.ask([&](SourceEndpoint&) {
    work();
    return true;
  });
}

void SourceSession::cancel(const TransferKey& key, std::string why) {
  thread_.post([=, why = std::move(why)](SourceEndpoint& endpoint) { endpoint.cancel(key, why); });
}

Expected<void> SourceSession::wait_layer_released(const TransferKey& key, LayerId layer, std::chrono::nanoseconds at_most,
                                                  const Interrupt& interrupt) {
  return layer_of<SourceEnded>(
      ledger_.wait(key, at_most, layer_or_end<SourceEnded>(layer), "a layer's pages are still read", interrupt), layer);
}

Expected<SourceEnded> SourceSession::wait(const TransferKey& key, std::chrono::nanoseconds at_most, const Interrupt& interrupt) {
  auto entry = ledger_.wait(key, at_most, kEnded, "still open", interrupt);
  if (!entry) return tl::unexpected(entry.error());
  return std::move(*entry->ended);
}

Expected<void> SourceSession::wait_released(const TransferKey& key, std::chrono::nanoseconds at_most,
                                            const Interrupt& interrupt) {
  return ledger_.wait(key, at_most, kReleased, "its pages are still read", interrupt).map([](const auto&) {});
}

// ---- target ----

Expected<std::unique_ptr<TargetSession>> TargetSession::make(TargetOptions options, Transport& transport, Sinks sinks,
                                                             Heard<TargetEvent> heard) {
  auto endpoint = TargetEndpoint::make(std::move(options), transport, std::move(sinks));
  if (!endpoint) return tl::unexpected(endpoint.error());
  return std::unique_ptr<TargetSession>(new TargetSession(std::move(*endpoint), transport, std::move(heard)));
}

TargetSession::TargetSession(std::unique_ptr<TargetEndpoint> endpoint, Transport& transport, Heard<TargetEvent> heard)
    : heard_(std::move(heard)),
      thread_(std::move(endpoint), transport, [this](std::vector<TargetEvent>& events) { note(events); }) {}

void TargetSession::note(std::vector<TargetEvent>& events) {
  if (heard_) heard_(events);
  note_all<LayerLanded>(ledger_, events);
}

void TargetSession::forget(GeometryId geometry) {
  thread_.ask([&](TargetEndpoint& endpoint) {
    endpoint.forget(geometry);
    return true;
  });
}

std::size_t TargetSession::open() {
  return thread_.ask([](TargetEndpoint& endpoint) { return endpoint.open(); });
}

Bytes TargetSession::covered(const TransferKey& key) {
  return thread_.ask([&](TargetEndpoint& endpoint) { return endpoint.covered(key); });
}

void TargetSession::run_on_thread(const std::function<void()>& work) {
  thread_.ask([&](TargetEndpoint&) {
    work();
    return true;
  });
}

Expected<GeometryId> TargetSession::describe(LocalCache cache) {
  return thread_.ask([&](TargetEndpoint& endpoint) { return endpoint.describe(std::move(cache)); });
}

Expected<void> TargetSession::begin(Want want) {
  return thread_.ask([&](TargetEndpoint& endpoint) {
    const TransferKey key = want.key;
    auto ok = endpoint.begin(std::move(want));
    if (ok) ledger_.open(key);
    return ok;
  });
}

void TargetSession::cancel(const TransferKey& key, std::string why) {
  thread_.post([=, why = std::move(why)](TargetEndpoint& endpoint) { endpoint.cancel(key, why); });
}

Expected<void> TargetSession::wait_layer(const TransferKey& key, LayerId layer, std::chrono::nanoseconds at_most,
                                         const Interrupt& interrupt) {
  return layer_of<TargetEnded>(ledger_.wait(key, at_most, layer_or_end<TargetEnded>(layer), "a layer has not landed", interrupt),
                               layer);
}

Expected<TargetEnded> TargetSession::wait(const TransferKey& key, std::chrono::nanoseconds at_most, const Interrupt& interrupt) {
  auto entry = ledger_.wait(key, at_most, kEnded, "still open", interrupt);
  if (!entry) return tl::unexpected(entry.error());
  return std::move(*entry->ended);
}

Expected<void> TargetSession::wait_released(const TransferKey& key, std::chrono::nanoseconds at_most,
                                            const Interrupt& interrupt) {
  return ledger_.wait(key, at_most, kReleased, "its pages are in quarantine still", interrupt).map([](const auto&) {});
}

}  // namespace kvloom
