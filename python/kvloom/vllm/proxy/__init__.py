"""The proxy in front of vLLM's prefill and decode servers: one OpenAI endpoint, both sides at work at the same time.

A request goes to a decode server and to a prefill server in the same moment, tied by a transfer key that the proxy makes for
this attempt. The decode server's answer is the client's; the prefill server only computes. What can be pushed layer by layer
needs both at once: a proxy that waits for prefill's answer before it asks decode has turned the push into a copy afterwards.

The parts, each one idea:
  config    what the command line and the JSON file say                 values
  asked     what a client's request is: its prompt, its size, its limits values
  wire      the two bodies that are sent, and the key between them      values
  choose    which instance: the least work until the answer             one loop, no I/O
  upstream  one request to one server, until its first token            I/O
  dispatch  one client's request: attempts, retries, cancellation       I/O
  answer    the client's side: bytes as they come, errors in their form I/O
  health    who is up                                                   I/O
  metrics, log, server                                                  the frame

Everything runs on one asyncio loop of one thread. Nothing here imports the compiled extension: the proxy may run where no
engine is. The wire between proxy and connector is fixed in docs/proxy.md.
"""
