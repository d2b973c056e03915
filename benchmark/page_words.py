"""What the words of the tables are called in Chinese."""

from __future__ import annotations

import re

__all__ = ["chinese"]

_NUMBERS = re.compile(r"(?:[-\d.,:() –]|x|ms|us|s|MB|MiB|GB|%|to|e\+)*")
_SAME = {"paddle_dist_ckpt", "torch DCP", "`.metadata`", "safetensors"}
_WORDS = {
    # who
    "Paddle's own": "Paddle 自己的函数",
    "probe, cached": "probe，经过页缓存",
    "probe, sync_file_range": "probe，sync_file_range",
    "probe, O_DIRECT": "probe，O_DIRECT",
    "torch DCP, by a thread": "torch DCP，由线程",
    "torch DCP, by a thread, staging memory kept": "torch DCP，由线程，保留暂存内存",
    "torch DCP, by a process": "torch DCP，由进程",
    # benchmark.run
    "State A: 6 layers of hidden size 1536, float32, 0.68 GB": "状态 A：6 层，hidden size 1536，float32，0.68 GB",
    "State B: 20,000 float32 tensors of 8 x 8, 5 MB": "状态 B：20,000 个 8 x 8 的 float32 张量，5 MB",
    "Memory that a call needs beyond the tensors": "调用在张量之外所需的内存",
    "save": "保存",
    "load": "加载",
    "save after 3 s idle": "空闲 3 s 之后保存",
    "load, same layout": "加载，布局相同",
    "load, Shard(0) and Shard(1) swapped": "加载，Shard(0) 与 Shard(1) 对调",
    "load 1 of 6 layers": "加载 6 层中的 1 层",
    "cold load, same layout": "冷加载，布局相同",
    "save, new tensors": "保存，张量是新的",
    "save again": "再次保存",
    "load, same layout, new tensors": "加载，布局相同，张量是新的",
    "load, Shard(1) instead of Shard(0), new tensors": "加载，Shard(0) 改为 Shard(1)，张量是新的",
    "most at any moment, worse rank": "任一时刻的最大值，较差的 rank",
    # benchmark.scale, benchmark.curves
    "Planning at scale": "大规模的规划",
    "Over the number of ranks": "随 rank 数变化",
    "Over the number of tensors": "随张量数变化",
    "Over tensors of 8 x 8 float32, one rank": "随张量数变化：8 x 8 的 float32 张量，一个 rank",
    "Over bytes, in tensors of 16 MB, one rank": "随字节数变化：每个张量 16 MB，一个 rank",
    "Over ranks that share the cores and 5,000 tensors of 8 x 8 float32, each cut among them": (
        "随 rank 数变化：各 rank 共用处理器核，5,000 个 8 x 8 的 float32 张量，每个张量由各 rank 切分"
    ),
    "Over simulated ranks, each with its part of 244 tensors; planning alone": (
        "随模拟 rank 数变化：每个 rank 持有 244 个张量中自己的部分；只做规划"
    ),
    "ranks": "rank 数",
    "tensors": "张量数",
    "shards": "分片数",
    "bytes": "字节数",
    "simulated ranks": "模拟 rank 数",
    "plan": "规划",
    "cached": "已缓存",
    "cached plan": "复用规划",
    "memory": "内存",
    "in": "收到",
    "out": "发出",
    "given": "答复一个 rank",
    "rank's plan": "该 rank 的规划",
    "plan: memory": "规划：内存",
    "first save": "第一次保存",
    "save: memory": "保存：内存",
    "load: memory": "加载：内存",
    "slope": "斜率",
    # benchmark.bytes_read, benchmark.exchange, benchmark.replicas
    "Bytes read for slices": "读取部分张量时的字节数",
    "what is loaded": "加载的内容",
    "needed": "所需",
    "read from files": "从文件读取",
    "sent between ranks": "在 rank 之间发送",
    "1/8 of the rows on one rank, as saved": "一个 rank 上八分之一的行，与保存时相同",
    "1/8 of the rows on one rank, 37 rows on": "一个 rank 上八分之一的行，后移 37 行",
    "1/8 of the rows on each rank, 37 rows on": "每个 rank 上八分之一的行，后移 37 行",
    '1/8 of the columns on each rank, exchange="always"': '每个 rank 上八分之一的列，exchange="always"',
    "1/8 of the columns on one rank": "一个 rank 上八分之一的列",
    "Exchange": "交换",
    "processor time of all together": "处理器时间之和",
    "unchecked load": "不校验的加载",
    "broadcasts alone": "只做广播",
    "the same between tensors": "只在张量之间广播",
    "load : unchecked (95 %)": "加载 : 不校验的加载（95%）",
    "broadcasts : load (95 %)": "广播 : 加载（95%）",
    "Comparing copies": "比较副本",
    "times one that compares nothing (95 %)": "相对不作比较的保存（95%）",
    # benchmark.export, benchmark.foreign
    "Export": "导出",
    "times the copy": "相对复制",
    "not cached": "不在页缓存中",
    "safetensors, in bfloat16": "safetensors，bfloat16",
    "native": "本库格式",
    "copy": "复制",
    "State D: 5,000 float32 tensors of 8 x 8": "状态 D：5,000 个 8 x 8 的 float32 张量",
    "State E: 50,000 float32 tensors of 8 x 8": "状态 E：50,000 个 8 x 8 的 float32 张量",
    "time": "时间",
    "on the cores": "处理器时间",
    ": own format (95 %)": "相对本库格式（95%）",
    "own format": "本库格式",
    "Paddle's `.distcp`": "Paddle 的 `.distcp`",
    # benchmark.async_save
    "Saves in the background": "后台保存",
    "stall of the first save": "第一次保存的停顿",
    "stall of the first save, prepared by a manager": "第一次保存的停顿，管理器已作准备",
    "stall of the first save in the background, after a synchronous one": "同步保存之后第一次后台保存的停顿",
    "stall": "停顿",
    "one copy of the bytes": "把这些字节复制一次",
    "step without a save": "没有保存时的训练步",
    "step during a save": "保存期间的训练步",
    "slowed by": "训练步变慢",
    "until the save has ended": "到保存结束为止",
    "a save costs in all": "损失的训练时间合计",
    "of that beyond the stall": "其中停顿以外的部分",
    # benchmark.device
    "Save": "保存",
    "Load": "加载",
    "Copies": "复制",
    "Memory during saves and loads": "保存与加载期间的内存",
    "copies without a limit": "复制不限速",
    "write: save of the same state in host memory": "写入：在主机内存中保存同样的状态",
    "copy: from the device to the host, nothing else": "复制：只从设备复制到主机",
    "save in the background: until the call returns": "后台保存：到调用返回为止",
    "read: load of the same state into host memory": "读取：把同样的状态加载到主机内存",
    "copy: from the host to the device, nothing else": "复制：只从主机复制到设备",
    'load with `exchange="always"`, cut along the other dimension': '以 `exchange="always"` 加载，沿另一维切分',
    "copy back": "复制到设备",
    "write": "写入",
    "read": "读取",
    "copies": "复制",
    "their bytes : state": "复制的字节 : 状态",
    "core": "处理器时间",
    "most at any moment": "任一时刻的最大值",
    "host": "主机",
    "device": "设备",
    "the disk": "磁盘",
    "reading": "读取",
    # what one thread does
    "memcpy": "内存复制",
    "xxh3": "xxh3 哈希",
    "writes past the cache": "绕过页缓存写入",
    "reads from the cache": "读取页缓存",
}
_PATTERNS = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\*\*(.+)\*\*", "**{}**"),
        (r"state ([A-E]): (.+)", "状态 {}：{}"),
        (r"load, (.+)", "加载，{}"),
        (r"load by Paddle itself, (.+)", "由 Paddle 自己加载，{}"),
        (r"what is in it, (.+)", "查看内容，{}"),
        (r"(.+ MiB), (.+ MiB) kept", "{}，保留 {}"),
        (r"copies as slow as (.+): (.+ GB)/s", "复制与{}一样慢：{}/s"),
        (r"([\d,]+) calls", "{} 次"),
        (r"(\d+) ranks", "{} 个 rank"),
        (r"(\d+) ranks: (.+)", "{} 个 rank：{}"),
        (r"(\w+): hidden", "{}：被掩盖的部分"),
        (r"(\w+) : (.+)", "{} : {}"),
        (r"max\((.+), (.+)\)", "max({}, {})"),
    )
]
_MACHINE = re.compile(r"(.+), (?:(\d+) of )?(\d+) cores, (.+) GiB of memory; GB/s of one thread: (.+)")


def chinese(text: str) -> str:
    """A cell, a caption, or the line about a machine in Chinese.

    Raises:
        ValueError: it has a word that has no translation here yet.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text in _SAME or _NUMBERS.fullmatch(text) or text.startswith("`check_replicas="):
        return text
    if machine := _MACHINE.fullmatch(text):
        cpu, used, cores, memory, rates = machine.groups()
        words = (rate.rsplit(" ", 1) for rate in rates.split(", "))
        each = "，".join(f"{chinese(name)} {value}" for name, value in words)
        of = f"{cores} 核" if used is None else f"{cores} 核中的 {used} 核"
        return f"{cpu}，{of}，{memory} GiB 内存；单个线程每秒的 GB 数：{each}"
    for pattern, translated in _PATTERNS:
        if found := pattern.fullmatch(text):
            return translated.format(*(one if re.fullmatch("[A-E]", one) else chinese(one) for one in found.groups()))
    raise ValueError(f"benchmark/page_words.py has no Chinese for {text!r}")
