"""JSON function calls: the narrow workload that the drafters in train/recipes/smollm2 are trained for."""

_SYSTEM = (
    'You call functions. Answer with one JSON object, {"name": <function name>, '
    '"arguments": {<argument>: <value>}}, and nothing else.'
)
# Two worked calls as earlier turns: told in one message, a small model describes functions and calls none.
_EXAMPLES = (
    (
        "timer.start(minutes: integer): Starts a timer",
        "Wake me in half an hour.",
        '{"name": "timer.start", "arguments": {"minutes": 30}}',
    ),
    (
        "mail.send(to: string, text: string): Sends an e-mail\n"
        "shop.find(query: string, max_price: integer): Searches the shop",
        "Show me red shoes under 50 dollars.",
        '{"name": "shop.find", "arguments": {"query": "red shoes", "max_price": 50}}',
    ),
)


def call_messages(signatures: str, request: str) -> list[dict[str, str]]:
    """The chat that asks for one call.

    Args:
      signatures: one line per function: name(argument: type, ...): what it does.
      request: in words.
    """

    def user(signatures: str, request: str) -> dict[str, str]:
        return {"role": "user", "content": f"Functions:\n{signatures}\n\nRequest: {request}"}

    messages = [{"role": "system", "content": _SYSTEM}]
    for example_signatures, example, call in _EXAMPLES:
        messages += [user(example_signatures, example), {"role": "assistant", "content": call}]
    return [*messages, user(signatures, request)]


CALLS = (
    call_messages(
        "garden.water(bed: string, minutes: integer): Waters a bed of the garden\n"
        "garden.light(on: boolean): Switches the garden lights",
        "Give the roses water for fifteen minutes.",
    ),
    call_messages(
        "bank.transfer(recipient: string, amount: float, currency: string): Transfers money",
        "Send Maria 45.50 euros.",
    ),
    call_messages(
        "train.search(origin: string, destination: string, date: string): Finds train connections\n"
        "hotel.search(city: string, nights: integer): Finds hotels",
        "I need a train from Lyon to Turin on 2026-05-03.",
    ),
)
