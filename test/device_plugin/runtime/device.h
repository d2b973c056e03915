// The devices of this process: memory, streams and copies.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "counters.h"
#include "memory.h"
#include "paddle/phi/backends/device_ext.h"
#include "streams.h"

namespace test_device {

inline double setting(const char* name, double fallback) {
  const char* text = std::getenv(name);
  return text ? std::strtod(text, nullptr) : fallback;
}

inline C_Status refuse(const std::string& reason) {
  std::fprintf(stderr, "test_device: %s\n", reason.c_str());
  return C_ERROR;
}

struct Device {
  explicit Device(size_t memory) : arena(memory) {}

  Arena arena;
  std::mutex mutex;
  std::set<Stream*> streams;

  // Wait for the work of all streams, or of those only that have run collectives.
  void synchronize(bool only_collectives = false) {
    std::vector<std::shared_ptr<Ticket>> marks;
    {
      std::lock_guard lock(mutex);
      for (Stream* stream : streams) {
        if (!stream->idle() && (stream->ran_collectives || !only_collectives)) marks.push_back(stream->mark());
      }
    }
    for (const auto& mark : marks) mark->wait();
  }
};

enum Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice };

// A copy between addresses that are known to be good. `move` may be called once, in any thread.
struct Copy {
  std::byte* to;
  const std::byte* from;
  size_t size;
  Link* link;

  void move() const {
    link->carry(size);
    std::memcpy(to, from, size);
  }

  // The same in a stream's thread.
  void move_in_stream() const {
    stream_ready = link->carry(size, stream_ready);
    stream_ready_is_told = true;
    std::memcpy(to, from, size);
  }
};

class Runtime {
 public:
  // It is never destroyed: threads of streams may still use it when the process ends. A process that was forked before
  // it used its devices gets its own, as its own environment says, when it first does.
  static Runtime& get() {
    static std::mutex mutex;
    static Runtime* runtime = nullptr;
    static pid_t owner = 0;
    std::lock_guard lock(mutex);
    if (owner != getpid()) {
      runtime = new Runtime;
      owner = getpid();
    }
    return *runtime;
  }

  std::vector<std::unique_ptr<Device>> devices;
  Counters counters;
  Lies lies;
  PinnedRanges pinned;
  Gate gate;
  Link links[3];  // by Direction
  Link network;

  void set_speed(double speed) {
    links[kHostToDevice].set_speed(speed);
    links[kDeviceToHost].set_speed(speed);
  }

  // The runtime's address of device memory, or nullptr. No bytes may be anywhere.
  std::byte* own(const void* address, size_t size) const {
    static std::byte nowhere;
    if (size == 0) return &nowhere;
    for (const auto& device : devices) {
      if (device->arena.holds(address)) return device->arena.own(address, size);
    }
    return nullptr;
  }

  C_Status copy_now(const char* name, Direction direction, void* to, const void* from, size_t size) {
    Copy copy;
    if (!prepare(direction, to, from, size, copy)) return refuse(name + std::string(": wrong kind of address"));
    counters.add(name, size);
    // Paddle itself waits for its stream of computations before. It relies on more, since it cuts what all_gather
    // brings with such copies: with CUDA they wait for all streams that Paddle has made for itself, though not for
    // those of paddle.device.Stream, which are "non-blocking" ones.
    for (const auto& device : devices) device->synchronize(true);
    copy.move();
    return C_SUCCESS;
  }

  C_Status copy_later(const char* name, Direction direction, Stream& stream, void* to, const void* from, size_t size) {
    Copy copy;
    if (!prepare(direction, to, from, size, copy)) return refuse(name + std::string(": wrong kind of address"));
    counters.add(name, size);
    const bool to_pageable = direction == kDeviceToHost && !pinned.cover(to, size);
    const bool from_pageable = direction == kHostToDevice && !pinned.cover(from, size);
    if (to_pageable || from_pageable) counters.add(std::string("pageable_") + name, size);
    if (from_pageable) {
      // As with CUDA, the source may change or go once this returns. Paddle relies on it: it copies from temporaries.
      const auto staged = std::make_shared<std::vector<std::byte>>(copy.from, copy.from + size);
      copy.from = staged->data();
      stream.submit([copy, staged] { copy.move_in_stream(); });
    } else {
      stream.submit([copy] { copy.move_in_stream(); });
    }
    if (to_pageable && pageable_waits_) stream.synchronize();
    return C_SUCCESS;
  }

 private:
  Runtime() {
    const auto memory = static_cast<size_t>(setting("TEST_DEVICE_MEMORY", 1 << 30));
    const auto count = static_cast<size_t>(setting("TEST_DEVICE_COUNT", 1));
    for (size_t i = 0; i < count; ++i) devices.push_back(std::make_unique<Device>(memory));
    set_speed(setting("TEST_DEVICE_SPEED", 0));
    network.set_speed(setting("TEST_DEVICE_NETWORK_SPEED", 0));
    pageable_waits_ = setting("TEST_DEVICE_PAGEABLE_WAITS", 0) != 0;
  }

  bool prepare(Direction direction, void* to, const void* from, size_t size, Copy& copy) {
    const bool to_device = direction != kDeviceToHost, from_device = direction != kHostToDevice;
    copy = {to_device ? own(to, size) : static_cast<std::byte*>(to),
            from_device ? own(from, size) : static_cast<const std::byte*>(from), size, &links[direction]};
    const bool host_is_device = (!to_device && on_device(to)) || (!from_device && on_device(from));
    return copy.to && copy.from && !host_is_device;
  }

  bool on_device(const void* address) const {
    for (const auto& device : devices) {
      if (device->arena.holds(address)) return true;
    }
    return false;
  }

  bool pageable_waits_;
};

}  // namespace test_device
