// Collectives between processes of one machine. Every pair of ranks has a ring of bytes each way in shared memory;
// all collectives are made of messages through these rings.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "reduce.h"
#include "streams.h"

namespace test_device {

// Bytes from one rank to another. One process writes, one reads.
struct Ring {
  static constexpr uint64_t kSize = 256 * 1024;
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::byte data[kSize];

  size_t push(const std::byte* from, size_t size) {
    const uint64_t start = written.load(std::memory_order_relaxed);
    size = std::min<size_t>(size, kSize - (start - read.load(std::memory_order_acquire)));
    const size_t first = std::min<size_t>(size, kSize - start % kSize);
    std::memcpy(data + start % kSize, from, first);
    std::memcpy(data, from + first, size - first);
    written.store(start + size, std::memory_order_release);
    return size;
  }

  size_t pull(std::byte* to, size_t size) {
    const uint64_t start = read.load(std::memory_order_relaxed);
    size = std::min<size_t>(size, written.load(std::memory_order_acquire) - start);
    const size_t first = std::min<size_t>(size, kSize - start % kSize);
    std::memcpy(to, data + start % kSize, first);
    std::memcpy(to + first, data, size - first);
    read.store(start + size, std::memory_order_release);
    return size;
  }
};

// What goes before the bytes of each message, so that ranks that do different things are told so rather than given
// each other's bytes.
struct Label {
  char operation[24];
  uint64_t size;
};

// One message on its way: the label, then the bytes.
class Transfer {
 public:
  Transfer(Ring& ring, bool sends, const char* operation, void* memory, size_t size)
      : ring(ring), sends(sends), memory_(static_cast<std::byte*>(memory)), size_(size) {
    std::snprintf(expected_.operation, sizeof expected_.operation, "%s", operation);
    expected_.size = size;
    label_ = expected_;
  }

  Ring& ring;
  bool sends;

  // Moves what can be moved now, and returns whether that was anything.
  bool advance() {
    const size_t before = labelled_ + moved_;
    if (labelled_ < sizeof label_) {
      labelled_ += move(reinterpret_cast<std::byte*>(&label_) + labelled_, sizeof label_ - labelled_);
      if (labelled_ == sizeof label_) check();
    }
    if (labelled_ == sizeof label_ && moved_ < size_) moved_ += move(memory_ + moved_, size_ - moved_);
    return labelled_ + moved_ > before;
  }

  // The same with a copy of the bytes, so that the memory may change before they are moved.
  Transfer detached() const {
    Transfer other = *this;
    other.kept_ = std::make_shared<std::vector<std::byte>>(memory_, memory_ + size_);
    other.memory_ = other.kept_->data();
    return other;
  }

  size_t size() const { return size_; }
  bool done() const { return labelled_ == sizeof label_ && moved_ == size_; }

 private:
  size_t move(std::byte* memory, size_t size) { return sends ? ring.push(memory, size) : ring.pull(memory, size); }

  void check() const {
    if (label_.size == expected_.size && !std::strcmp(label_.operation, expected_.operation)) return;
    std::fprintf(stderr, "test_device: this rank expects %s of %zu bytes, the other rank has %s of %zu bytes\n",
                 expected_.operation, static_cast<size_t>(expected_.size), label_.operation,
                 static_cast<size_t>(label_.size));
    std::abort();
  }

  std::byte* memory_;
  size_t size_;
  std::shared_ptr<std::vector<std::byte>> kept_;
  Label expected_{}, label_{};
  size_t labelled_ = 0, moved_ = 0;
};

// Moves messages in a thread of its own: through different rings at the same time, through one ring in their order.
class Mover {
 public:
  // `keep` lives as long as the thread may use the rings.
  explicit Mover(std::shared_ptr<void> keep) : lanes_(std::make_shared<Lanes>()) {
    std::thread([lanes = lanes_, keep] { lanes->serve(); }).detach();
  }

  ~Mover() {
    std::lock_guard lock(lanes_->mutex);
    lanes_->closed = true;
    lanes_->changed.notify_all();
  }

  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // Returns a ticket that finishes when all have been moved.
  std::shared_ptr<Ticket> post(const std::vector<Transfer>& transfers) {
    auto batch = std::make_shared<Batch>();
    batch->left = transfers.size();
    if (transfers.empty()) batch->done.finish();
    std::lock_guard lock(lanes_->mutex);
    for (const Transfer& transfer : transfers) {
      lanes_->waiting[{&transfer.ring, transfer.sends}].push_back({transfer, batch});
    }
    lanes_->changed.notify_all();
    return {batch, &batch->done};
  }

 private:
  struct Batch {
    size_t left;
    Ticket done;
  };

  struct Lanes {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::pair<Ring*, bool>, std::deque<std::pair<Transfer, std::shared_ptr<Batch>>>> waiting;
    bool closed = false;

    void serve() {
      std::unique_lock lock(mutex);
      for (int idle = 0;; ++idle) {
        changed.wait(lock, [this] { return closed || !waiting.empty(); });
        if (waiting.empty()) return;
        if (pass()) idle = 0;
        lock.unlock();
        if (idle > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (idle > 0) std::this_thread::yield();
        lock.lock();
      }
    }

    bool pass() {
      bool moved = false;
      for (auto lane = waiting.begin(); lane != waiting.end();) {
        auto& [transfer, batch] = lane->second.front();
        moved = transfer.advance() || moved;
        if (transfer.done()) {
          if (--batch->left == 0) batch->done.finish();
          lane->second.pop_front();
        }
        lane = lane->second.empty() ? waiting.erase(lane) : std::next(lane);
      }
      return moved;
    }
  };

  std::shared_ptr<Lanes> lanes_;
};

// The ranks of one group. Its collectives run in the order in which this rank asked for them, whatever the stream.
class Communicator {
 public:
  // All ranks call it with one name, and it returns when all have.
  Communicator(const std::string& name, size_t rank, size_t size) : rank(rank), size(size) {
    const size_t bytes = sizeof(Shared) + size * size * sizeof(Ring);
    const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    // New shared memory is zeros, which is an empty ring: whoever comes first has nothing to prepare.
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("no shared memory");
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (address == MAP_FAILED) throw std::runtime_error("cannot map shared memory");
    shared_ = std::shared_ptr<Shared>(static_cast<Shared*>(address), [bytes](Shared* it) { munmap(it, bytes); });
    mover_ = std::make_unique<Mover>(shared_);
    if (++shared_->joined == size) shm_unlink(name.c_str());
    while (shared_->joined < size) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }

  const size_t rank, size;

  // Queue work of one or more groups. It begins after all that these groups were given before.
  template <typename Work>
  static void submit(Stream& stream, const std::set<std::shared_ptr<Communicator>>& groups, Work work) {
    static std::mutex one_order;
    std::lock_guard lock(one_order);
    const auto done = std::make_shared<Ticket>();
    std::vector<std::shared_ptr<Ticket>> earlier;
    for (const auto& group : groups) earlier.push_back(std::exchange(group->last_, done));
    stream.ran_collectives = true;
    stream.submit([groups, earlier, done, work] {
      for (const auto& ticket : earlier) {
        if (ticket) ticket->wait();
      }
      work();
      done->finish();
    });
  }

  std::shared_ptr<Ticket> post(const std::vector<Transfer>& transfers) const { return mover_->post(transfers); }

  Transfer sending(size_t to, const char* operation, const void* memory, size_t bytes) const {
    return Transfer(ring(rank, to), true, operation, const_cast<void*>(memory), bytes);
  }

  Transfer receiving(size_t from, const char* operation, void* memory, size_t bytes) const {
    return Transfer(ring(from, rank), false, operation, memory, bytes);
  }

 private:
  struct Shared {
    alignas(64) std::atomic<uint64_t> joined;
  };

  Ring& ring(size_t from, size_t to) const {
    return reinterpret_cast<Ring*>(shared_.get() + 1)[from * size + to];
  }

  std::shared_ptr<Shared> shared_;
  std::unique_ptr<Mover> mover_;
  std::shared_ptr<Ticket> last_;
};

// The algorithms. They run in a stream's thread, and all ranks run the same one.
class Collective {
 public:
  Collective(const Communicator& group, const char* operation) : group_(group), operation_(operation) {}

  void broadcast(std::byte* memory, size_t bytes, size_t root) const {
    std::vector<Transfer> transfers;
    if (group_.rank != root) transfers.push_back(receive(root, memory, bytes));
    for (size_t rank = 0; group_.rank == root && rank < group_.size; ++rank) {
      if (rank != root) transfers.push_back(send(rank, memory, bytes));
    }
    group_.post(transfers)->wait();
  }

  // Rank r gets sizes_out[r] bytes of outs[r]; what it has for this rank goes into ins[r].
  void all_to_all(const std::vector<const std::byte*>& outs, const std::vector<size_t>& sizes_out,
                  const std::vector<std::byte*>& ins, const std::vector<size_t>& sizes_in) const {
    std::vector<Transfer> transfers;
    for (size_t rank = 0; rank < group_.size; ++rank) {
      if (rank == group_.rank) {
        std::memmove(ins[rank], outs[rank], sizes_out[rank]);
      } else {
        transfers.push_back(send(rank, outs[rank], sizes_out[rank]));
        transfers.push_back(receive(rank, ins[rank], sizes_in[rank]));
      }
    }
    group_.post(transfers)->wait();
  }

  // Elements bounds[r] to bounds[r + 1] of all ranks are reduced into `output` of rank r.
  void reduce_parts(const std::byte* input, std::byte* output, const std::vector<size_t>& bounds, C_DataType type,
                    C_CCLReduceOp op) const {
    const size_t item = size_of(type), count = bounds[group_.rank + 1] - bounds[group_.rank];
    std::vector<std::byte> scratch(group_.size * count * item);
    std::vector<const std::byte*> outs;
    std::vector<size_t> sizes_out, sizes_in(group_.size, count * item);
    std::vector<std::byte*> ins;
    for (size_t rank = 0; rank < group_.size; ++rank) {
      outs.push_back(input + bounds[rank] * item);
      sizes_out.push_back((bounds[rank + 1] - bounds[rank]) * item);
      ins.push_back(scratch.data() + rank * count * item);
    }
    all_to_all(outs, sizes_out, ins, sizes_in);
    reduce({ins.begin(), ins.end()}, output, count, type, op);
  }

  // Elements bounds[r] to bounds[r + 1] come from rank r.
  void gather_parts(const std::byte* part, std::byte* output, const std::vector<size_t>& bounds, size_t item) const {
    std::vector<std::byte*> ins;
    std::vector<size_t> sizes_in;
    for (size_t rank = 0; rank < group_.size; ++rank) {
      ins.push_back(output + bounds[rank] * item);
      sizes_in.push_back((bounds[rank + 1] - bounds[rank]) * item);
    }
    const std::vector<const std::byte*> outs(group_.size, part);
    all_to_all(outs, std::vector<size_t>(group_.size, sizes_in[group_.rank]), ins, sizes_in);
  }

 private:
  Transfer send(size_t to, const std::byte* memory, size_t bytes) const {
    return group_.sending(to, operation_, memory, bytes);
  }
  Transfer receive(size_t from, std::byte* memory, size_t bytes) const {
    return group_.receiving(from, operation_, memory, bytes);
  }

  const Communicator& group_;
  const char* const operation_;
};

}  // namespace test_device
