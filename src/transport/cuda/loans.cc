#include "kvloom/transport/cuda/loans.h"

#include <algorithm>

namespace kvloom::cuda {

std::shared_ptr<Loans::Loan> Loans::lend(CUdeviceptr address, std::size_t bytes) {
  auto loan = std::make_shared<Loan>(*this, address, bytes);
  const std::unique_lock alone(mutex_);
  lent_.emplace(address, loan.get());
  return loan;
}

std::unique_ptr<Loans::Borrowed> Loans::borrow(CUdeviceptr address, std::size_t bytes) {
  const std::unique_lock alone(mutex_);
  for (auto [at, end] = lent_.equal_range(address); at != end; ++at) {
    if (at->second->bytes_ != bytes) continue;
    auto loan = at->second->weak_from_this().lock();
    if (loan == nullptr) continue;  // its destructor waits for us
    ++loan->readers_;
    return std::make_unique<Borrowed>(*this, std::move(loan));
  }
  return nullptr;
}

void Loans::end(Loan& loan) {
  const std::unique_lock alone(mutex_);
  if (loan.ended_.exchange(true)) return;
  const auto [first, last] = lent_.equal_range(loan.address_);
  lent_.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == &loan; }));
  if (loan.readers_ == 0) return;
  for (int i = 0; i < loan.readers_; ++i) ended_.emplace(loan.address_, loan.bytes_);
  ended_count_ = ended_.size();
  for (Reader* reader : readers_) reader->drain_for_lender();
}

void Loans::give_up(Loan& loan) {
  const std::unique_lock alone(mutex_);
  --loan.readers_;
  if (!loan.ended_) return;
  const auto [first, last] = ended_.equal_range(loan.address_);
  if (const auto at = std::find_if(first, last, [&](const auto& entry) { return entry.second == loan.bytes_; }); at != last)
    ended_.erase(at);
  ended_count_ = ended_.size();
}

void Loans::add(Reader& reader) {
  const std::unique_lock alone(mutex_);
  readers_.insert(&reader);
}

void Loans::remove(Reader& reader) {
  const std::unique_lock alone(mutex_);
  readers_.erase(&reader);
}

// Another region may have lent the same memory, and stand.
bool Loans::is_lent(CUdeviceptr address, std::size_t bytes) const {
  const auto [first, last] = lent_.equal_range(address);
  return std::any_of(first, last, [&](const auto& entry) { return entry.second->bytes_ >= bytes; });
}

bool Loans::may_read(const shm::CopyWork& work) const {
  if (ended_count_.load() == 0) return true;
  return std::ranges::all_of(work.stretches(), [&](const shm::Stretch& stretch) {
    const auto address = reinterpret_cast<CUdeviceptr>(stretch.like.source);
    const auto [first, last] = ended_.equal_range(address);
    return std::all_of(first, last, [&](const auto& entry) { return is_lent(address, entry.second); });
  });
}

}  // namespace kvloom::cuda
