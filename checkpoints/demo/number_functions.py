"""Common functions on one to three numbers, in the format of `checkpoints.demo.singles`."""

BLOCKS = """
add sum_of_two add_numbers plus add_two_numbers|number number
=the sum of $a and $b
!add $a and $b
=the sum of two numbers
-return $a + $b

subtract difference minus sub|number number
=the difference of $a and $b
!subtract $b from $a
=$a minus $b
-return $a - $b

multiply product times mul|number number
=the product of $a and $b
!multiply $a by $b
!multiply two numbers
-return $a * $b

divide quotient div ratio|number number
=$a divided by $b
!divide $a by $b
-return $a / $b

safe_divide divide_or_none try_divide|number number
=$a divided by $b, or None if $b is zero
!divide, with None for a division by zero
-if $b == 0:
    return None
return $a / $b

floor_divide integer_divide whole_quotient|number number
=$a divided by $b, rounded down
!divide two integers, rounding down
-return $a // $b

remainder modulo mod|number number
=the remainder of $a divided by $b
-return $a % $b

quotient_and_remainder div_and_mod divide_with_remainder|number number
=the quotient and the remainder of $a divided by $b
-return $a // $b, $a % $b

power raise_to pow_of exponentiate|number:base,b,x,n small:exponent,exp,e,p,power
=$a to the power of $b
!raise $a to the power $b
-return $a ** $b

average_of_two mean_of_two midpoint|number number
=the average of $a and $b
=the mean of two numbers
-return ($a + $b) / 2

average_of_three mean_of_three|number number number
=the average of $a, $b and $c
-return ($a + $b + $c) / 3

add_three sum_of_three|number number number
=the sum of $a, $b and $c
!add three numbers
-return $a + $b + $c

multiply_three product_of_three|number number number
=the product of $a, $b and $c
-return $a * $b * $c

maximum max_of_two larger bigger max_two greater|number number
=the larger of $a and $b
=the maximum of two numbers
-return $a if $a > $b else $b
-if $a > $b:
    return $a
return $b
-return max($a, $b)

minimum min_of_two smaller lesser min_two|number number
=the smaller of $a and $b
=the minimum of two numbers
-return $a if $a < $b else $b
-if $a < $b:
    return $a
return $b
-return min($a, $b)

max_of_three largest_of_three maximum_of_three max_three|number number number
=the largest of $a, $b and $c
=the maximum of three numbers
-return max($a, $b, $c)

min_of_three smallest_of_three minimum_of_three min_three|number number number
=the smallest of $a, $b and $c
-return min($a, $b, $c)

middle_of_three median_of_three|number number number
=the middle one of $a, $b and $c
-return sorted([$a, $b, $c])[1]

swap swap_values swap_pair exchange|number number
=$b and $a, swapped
!swap two values
-return $b, $a

distance absolute_difference abs_diff|number number
=the absolute difference of $a and $b
=the distance between two numbers
-return abs($a - $b)

sum_of_squares_of_two squares_sum|number number
=the sum of the squares of $a and $b
-return $a ** 2 + $b ** 2

hypotenuse|number number
=the length of the hypotenuse of a right triangle with sides $a and $b
-return ($a ** 2 + $b ** 2) ** 0.5

are_equal is_equal equal same equals|number number
?$a and $b are equal
-return $a == $b

is_greater greater_than is_larger|number number
?$a is greater than $b
-return $a > $b

is_less less_than is_smaller|number number
?$a is less than $b
-return $a < $b

is_divisible divisible is_multiple is_divisible_by|count:n,number,x,a count:divisor,d,k,b,m
?$a is divisible by $b
?$a is a multiple of $b
-return $a % $b == 0

same_sign have_same_sign|number number
?$a and $b have the same sign
-return ($a < 0) == ($b < 0)

compare compare_numbers|number number
=1 if $a is greater than $b, -1 if it is less, and 0 if they are equal
-if $a > $b:
    return 1
if $a < $b:
    return -1
return 0

clamp limit constrain clip bound|number:value,x,n,v,number number:low,minimum,lower,lo,min_value number:high,maximum,upper,hi,max_value
=$a limited to the range from $b to $c
!clamp $a between $b and $c
-return max($b, min($a, $c))

in_range is_between between is_in_range within|number:value,x,n,number number:low,start,lower,a number:high,end,upper,b
?$a is between $b and $c
?$a lies in the range from $b to $c
-return $b <= $a <= $c

linear line evaluate_line|number:m,slope,a number:x,t number:b,offset,c
=$a times $b plus $c
-return $a * $b + $c

is_triangle valid_triangle|count count count
?$a, $b and $c can be the sides of a triangle
-return $a + $b > $c and $a + $c > $b and $b + $c > $a

gcd greatest_common_divisor find_gcd common_divisor|count count
=the greatest common divisor of $a and $b
-while $b:
    $a, $b = $b, $a % $b
return $a
-while $b != 0:
    $a, $b = $b, $a % $b
return $a

lcm least_common_multiple|count count
=the least common multiple of $a and $b
-$r = $a
while $r % $b != 0:
    $r += $a
return $r

is_even even check_even is_even_number|number
?$a is even
?a number is even
-return $a % 2 == 0

is_odd odd check_odd is_odd_number|number
?$a is odd
?a number is odd
-return $a % 2 == 1
-return $a % 2 != 0

is_positive positive check_positive|number
?$a is positive
?$a is greater than zero
-return $a > 0

is_negative negative check_negative|number
?$a is negative
?$a is less than zero
-return $a < 0

is_zero zero check_zero|number
?$a is zero
-return $a == 0

square squared get_square|number
=the square of $a
!square a number
-return $a * $a
-return $a ** 2

cube cubed get_cube|number
=the cube of $a
-return $a ** 3
-return $a * $a * $a

double twice doubled times_two|number
=twice $a
!double $a
-return $a * 2
-return 2 * $a

triple tripled times_three|number
=three times $a
!triple $a
-return $a * 3

half halve halved|number
=half of $a
-return $a / 2

negate negative_of opposite|number
=the negative of $a
!negate a number
-return -$a

increment add_one plus_one successor next_number|number
=$a plus one
!add one to $a
-return $a + 1

decrement subtract_one minus_one predecessor|number
=$a minus one
-return $a - 1

absolute_value absolute abs_value magnitude|number
=the absolute value of $a
-return abs($a)
-if $a < 0:
    return -$a
return $a
-return $a if $a >= 0 else -$a

sign signum get_sign sign_of|number
=the sign of $a: 1, 0 or -1
=1 if $a is positive, -1 if it is negative, and 0 if it is zero
-if $a > 0:
    return 1
if $a < 0:
    return -1
return 0

identity same return_value|number
=$a itself
-return $a

last_digit ones_digit units_digit|count
=the last digit of $a
-return $a % 10

first_digit leading_digit|count
=the first digit of $a
-return int(str($a)[0])

factorial fact compute_factorial get_factorial|small:n,number,k,x,num
=the factorial of $a
!compute the factorial of $a
-$r = 1
for $i in range(2, $a + 1):
    $r *= $i
return $r
-$r = 1
for $i in range(1, $a + 1):
    $r *= $i
return $r

factorial_recursive recursive_factorial fact_rec|small:n,number,k
=the factorial of $a, by recursion
-if $a <= 1:
    return 1
return $a * $f($a - 1)

fibonacci fib nth_fibonacci get_fibonacci|count:n,k,number,index,num
=the $a-th Fibonacci number
=the nth Fibonacci number
-a, b = 0, 1
for _ in range($a):
    a, b = b, a + b
return a

fibonacci_recursive recursive_fibonacci fib_rec|small:n,k,number
=the $a-th Fibonacci number, by recursion
-if $a < 2:
    return $a
return $f($a - 1) + $f($a - 2)

fibonacci_list first_fibonacci fibonacci_numbers fib_sequence|count:n,count,k,length
=a list of the first $a Fibonacci numbers
-$r = []
a, b = 0, 1
for _ in range($a):
    $r.append(a)
    a, b = b, a + b
return $r

is_prime prime check_prime is_prime_number|number:n,number,num,x,k,value
?$a is a prime number
?$a is prime
-if $a < 2:
    return False
for $i in range(2, int($a ** 0.5) + 1):
    if $a % $i == 0:
        return False
return True
-if $a < 2:
    return False
for $i in range(2, $a):
    if $a % $i == 0:
        return False
return True

divisors factors get_divisors all_divisors find_factors|count:n,number,x
=a list of the divisors of $a
=all factors of $a
-return [$i for $i in range(1, $a + 1) if $a % $i == 0]

count_divisors number_of_divisors|count:n,number,x
=the number of divisors of $a
-return sum(1 for $i in range(1, $a + 1) if $a % $i == 0)

sum_of_divisors sum_divisors|count:n,number,x
=the sum of the divisors of $a
-return sum($i for $i in range(1, $a + 1) if $a % $i == 0)

is_perfect perfect_number is_perfect_number|count:n,number,x
?$a equals the sum of its proper divisors
-return $a == sum($i for $i in range(1, $a) if $a % $i == 0)

is_perfect_square perfect_square is_square|count:n,number,x
?$a is a perfect square
-return int($a ** 0.5) ** 2 == $a

is_power_of_two power_of_two|count:n,number,x
?$a is a power of two
-return $a > 0 and $a & ($a - 1) == 0
"""  # noqa: E501
