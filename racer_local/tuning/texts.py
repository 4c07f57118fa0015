"""The texts that are measured with: what a user might ask, and what models are compared on."""

EDIT = """\
Rename the variable total to amount in this function and write the whole function again, with nothing else changed.

def invoice(items, discount=0.0, tax=0.19):
    total = 0.0
    for item in items:
        if item.quantity < 1:
            raise ValueError("the quantity of an item must be at least one")
        price = item.price * item.quantity
        if item.reduced:
            price = price * 0.93
        total = total + price
    if discount:
        total = total - total * discount
    total = total + total * tax
    return round(total, 2)

def reminder(invoice, days):
    if days < 14:
        return "Thank you for your order."
    if days < 30:
        return "Please remember to pay your invoice within the next days."
    return "Your invoice is overdue. Please pay it now, or write to us if something is wrong with it."
"""
PROSE = "Thank you. Now tell me, in your own words, how a river changes a landscape over the years."

COMPARED = """\
The library stood at the end of a narrow street, behind two old lime trees. Nobody could say how many books it held,
for the catalogue had been begun three times and finished never. In the mornings the reading room belonged to retired
teachers and to a young woman who was writing a history of the harbour; in the afternoons school children came, did
their homework and whispered. The librarian, Mr. Haas, knew every one of them by name. When it rained he put a bucket
under the leak in the hall, and when it snowed he swept the steps himself.

Water boils at 100 degrees Celsius at sea level. On a mountain of 3,000 metres it boils at about 90 degrees, because
the pressure of the air is lower there. That is why pasta takes longer to cook in the mountains: the water is less
hot, and more fire does not help. A pressure cooker does the opposite. It keeps the steam in until the pressure is
about twice that of the air outside, and the water boils at 120 degrees.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

for name, values in sorted(results.items()):
    print(f"{name}: median {median(values):.2f}, from {min(values):.2f} to {max(values):.2f}")

Question: A train leaves at 9:40 and arrives at 13:05. It stops twice, for ten minutes each time. How long is it
moving?
Answer: From 9:40 to 13:05 are 3 hours and 25 minutes. The two stops take 20 minutes together. So the train is moving
for 3 hours and 5 minutes.

Dear Ms. Okafor, thank you for your letter of 3 May. We are sorry that the lamp arrived broken. A new one was sent to
you this morning; you do not have to send the old one back. If there is anything else we can do, please write to us.
"""
