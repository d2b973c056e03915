// Memory of a device, apart from the host's: every byte has two addresses. Paddle gets one that nobody may touch, so
// that host code that takes it for host memory dies at once; the runtime reads and writes through the other.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>

namespace test_device {

class Arena {
 public:
  explicit Arena(size_t capacity) : capacity_(rounded(capacity)) {
    const int file = memfd_create("test-device-memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(capacity_)) != 0) throw std::runtime_error("no device memory");
    shown_ = map(file, PROT_NONE);
    own_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
    free_[0] = capacity_;
  }

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns the address to show to Paddle, or nullptr if there is no room.
  void* allocate(size_t size) {
    size = rounded(std::max<size_t>(size, 1));
    std::lock_guard lock(mutex_);
    const auto fits = [size](const auto& hole) { return hole.second >= size; };
    const auto hole = std::find_if(free_.begin(), free_.end(), fits);
    if (hole == free_.end()) return nullptr;
    const auto [offset, room] = *hole;
    free_.erase(hole);
    if (room > size) free_[offset + size] = room - size;
    used_[offset] = size;
    bytes_ += size;
    peak_ = std::max(peak_, bytes_);
    return shown_ + offset;
  }

  // The pages are given back, so that who still reads the memory gets zeros.
  bool release(const void* address) {
    std::lock_guard lock(mutex_);
    const auto block = used_.find(static_cast<const std::byte*>(address) - shown_);
    if (block == used_.end()) return false;
    auto [offset, size] = *block;
    used_.erase(block);
    bytes_ -= size;
    madvise(own_ + offset, size, MADV_REMOVE);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + size) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
      std::prev(next)->second += size;
    } else {
      free_[offset] = size;
    }
    return true;
  }

  bool holds(const void* address) const {
    return address >= shown_ && address < shown_ + capacity_;
  }

  // Returns the runtime's address of bytes that Paddle was shown, or nullptr if they are not all of one allocation.
  std::byte* own(const void* address, size_t size) const {
    if (!holds(address)) return nullptr;
    std::lock_guard lock(mutex_);
    const size_t offset = static_cast<const std::byte*>(address) - shown_;
    auto block = used_.upper_bound(offset);
    if (block == used_.begin()) return nullptr;
    --block;
    return offset + size <= block->first + block->second ? own_ + offset : nullptr;
  }

  size_t capacity() const { return capacity_; }
  size_t bytes() const { std::lock_guard lock(mutex_); return bytes_; }
  size_t peak() const { std::lock_guard lock(mutex_); return peak_; }
  void reset_peak() { std::lock_guard lock(mutex_); peak_ = bytes_; }

 private:
  static size_t rounded(size_t size) { return (size + kPage - 1) / kPage * kPage; }

  std::byte* map(int file, int protection) const {
    void* address = mmap(nullptr, capacity_, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED) throw std::runtime_error("cannot map device memory");
    return static_cast<std::byte*>(address);
  }

  static constexpr size_t kPage = 4096;
  const size_t capacity_;
  std::byte* shown_ = nullptr;
  std::byte* own_ = nullptr;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_, used_;  // offset -> size
  size_t bytes_ = 0, peak_ = 0;
};

// Host memory that is pinned: allocated as such, or registered later.
class PinnedRanges {
 public:
  void add(const void* address, size_t size) {
    std::lock_guard lock(mutex_);
    ranges_[reinterpret_cast<uintptr_t>(address)] = size;
  }

  bool remove(const void* address) {
    std::lock_guard lock(mutex_);
    return ranges_.erase(reinterpret_cast<uintptr_t>(address)) > 0;
  }

  bool cover(const void* address, size_t size) const {
    std::lock_guard lock(mutex_);
    const auto start = reinterpret_cast<uintptr_t>(address);
    auto range = ranges_.upper_bound(start);
    if (range == ranges_.begin()) return false;
    --range;
    return start + size <= range->first + range->second;
  }

  size_t bytes() const {
    std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (const auto& range : ranges_) sum += range.second;
    return sum;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

}  // namespace test_device
