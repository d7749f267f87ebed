#include "kvloom/transport/transport.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace kvloom {

Region& Region::operator=(Region&& other) noexcept {
  Region old;
  old.swap(*this);
  swap(other);
  return *this;
}

Region::~Region() {
  if (owner_ != nullptr) owner_->deregister(id_);
}

void Region::swap(Region& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(id_, other.id_);
  std::swap(memory_, other.memory_);
}

void Transport::assert_owner(const char* call) const {
  if (owner_ == std::this_thread::get_id()) return;
  std::fprintf(stderr, "kvloom: Transport::%s was called by a thread that does not own the transport\n", call);
  std::abort();
}

namespace {

std::string text(const PeerUp& e) { return fmt::format("up peer={} hello={}", e.peer.value, e.hello.size()); }
std::string text(const PeerDown& e) { return fmt::format("down peer={} reason=\"{}\"", e.peer.value, to_string(e.reason)); }
std::string text(const Completed& e) {
  const std::string head = fmt::format("completed post={} peer={} tag={}", e.post.value, e.peer.value, e.tag.value);
  return e.delivered ? fmt::format("{} delivered={}", head, e.delivered->value)
                     : fmt::format("{} error=\"{}\"", head, to_string(e.delivered.error()));
}
std::string text(const Notice& e) {
  return fmt::format("notice peer={} tag={} bytes={}", e.peer.value, e.tag.value, e.payload.size());
}

}  // namespace

std::string to_string(const Event& event) {
  return std::visit([](const auto& e) { return text(e); }, event);
}

}  // namespace kvloom
