"""Common functions on the elements of one or two lists, in the format of `checkpoints.demo.singles`."""

BLOCKS = """
frequencies count_each count_items frequency counter tally count_frequencies count_elements_of|items
=a dict of how often each element of $a occurs
!count each element of $a
-$r = {}
for $x in $a:
    $r[$x] = $r.get($x, 0) + 1
return $r

most_common mode most_frequent most_common_element|some_items
=the most common element of $a
-return max($a, key=$a.count)

common_elements intersection common intersect shared|some_items some_items
=the set of elements in both $a and $b
=the intersection of $a and $b
-return set($a) & set($b)

union all_elements unite|some_items some_items
=the set of elements in $a or $b
=the union of $a and $b
-return set($a) | set($b)

difference set_difference only_in_first|some_items some_items
=the set of elements of $a that are not in $b
-return set($a) - set($b)

symmetric_difference in_only_one|some_items some_items
=the set of elements in only one of $a and $b
-return set($a) ^ set($b)

is_subset subset contains_all|some_items some_items
?every element of $a is in $b
?$a is a subset of $b
-return set($a) <= set($b)

have_common_element overlap share_element|some_items some_items
?$a and $b have an element in common
-return bool(set($a) & set($b))

same_elements equal_sets|some_items some_items
?$a and $b have the same elements
-return set($a) == set($b)

interleave alternate weave|items items
=the elements of $a and $b in turn
-$r = []
for $x, $y in zip($a, $b):
    $r.extend([$x, $y])
return $r

enumerate_items with_index number_items|items
=a list of pairs of index and element of $a
-return list(enumerate($a))

chunk chunks split_into_chunks batches|items small:size,n,length,k
=$a in pieces of $b elements
!split $a into chunks of $b elements
-return [$a[$i:$i + $b] for $i in range(0, len($a), $b)]

split_in_half halves split_half|items
=the first and the second half of $a
-$i = len($a) // 2
return $a[:$i], $a[$i:]

partition_even_odd split_even_odd separate_even_odd|numbers
=the even numbers and the odd numbers of $a
-return [$x for $x in $a if $x % 2 == 0], [$x for $x in $a if $x % 2 == 1]

is_palindrome_list list_palindrome|items
?$a is the same in reverse order
-return $a == $a[::-1]

copy_list copy clone|items
=a copy of $a
-return list($a)

to_set make_set as_set|items
=the set of elements of $a
-return set($a)

remove_none drop_none filter_none compact|items
=$a without None
-return [$x for $x in $a if $x is not None]

binary_search|sorted_numbers number:target,x,value
=the index of $b in the sorted list $a, or -1
-low, high = 0, len($a) - 1
while low <= high:
    mid = (low + high) // 2
    if $a[mid] == $b:
        return mid
    if $a[mid] < $b:
        low = mid + 1
    else:
        high = mid - 1
return -1
"""
